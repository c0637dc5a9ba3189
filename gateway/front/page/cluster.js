// The cluster's page: the gateway's view each second, and what is chosen of it.
import { Charts } from "./charts.js";
import { workersOf } from "./cluster_model.js";
import { setText } from "./dom.js";
import { Feed } from "./feed.js";
import { Requests, rowsOf } from "./requests.js";
import { Stages } from "./stages.js";
import { Topology } from "./topology.js";
import { drawWaterfall } from "./waterfall.js";
import { drawBlockLegend, drawWorker } from "./worker_detail.js";

const at = (id) => document.getElementById(id);
const charts = new Charts(at("charts"));
const stages = new Stages(at("stages"), at("num-live"));
const topology = new Topology(at("topology"), point, selectWorker);
const requests = new Requests(at("requests"), at("requests-note"), selectRequest);

let [view, rows] = [null, []];
let pointed = null; // the worker whose numbers are shown while it is pointed at
let chosen = null; // the row whose waterfall is shown, as it was last seen

function show(newView, recent) {
  view = newView;
  rows = rowsOf(view, recent);
  document.body.classList.remove("lost");
  showStatus("ready", "live");
  setText(at("model"), view.model);
  topology.show(view);
  stages.show(view);
  charts.show(view);
  requests.show(view, rows);
  showWorker();
  showRequest();
}

function lose(since, error) {
  document.body.classList.add("lost");
  const why = error.name === "TimeoutError" || error instanceof TypeError ? "" : ` (${error.message})`;
  showStatus("lost", `gateway gone since ${since.toLocaleTimeString()}${why}, still asking`);
}

function showStatus(state, text) {
  setText(at("status"), text);
  at("status").dataset.state = state;
}

function point(id) {
  pointed = id;
  showWorker();
}

function selectWorker(id) {
  const worker = id === topology.selected ? null : id;
  topology.selected = requests.worker = worker;
  at("all-workers").hidden = !worker;
  if (view) {
    topology.show(view);
    requests.show(view, rows);
    showWorker();
  }
}

let shownWorker = "";
function showWorker() {
  const all = view ? ["prefill", "decode"].flatMap((role) => workersOf(view, role)) : [];
  const worker = all.find(({ id }) => id === (pointed ?? topology.selected));
  const numbers = JSON.stringify(worker ?? null);
  if (numbers === shownWorker) return;
  shownWorker = numbers;
  at("worker").replaceChildren(drawWorker(worker));
}

function selectRequest(id) {
  requests.selected = id;
  chosen = null;
  requests.show(view, rows);
  showRequest();
  const isBelow = at("detail").getBoundingClientRect().top > innerHeight - 120;
  if (isBelow) at("detail").scrollIntoView({ block: "nearest" });
}

/** One that ended stays as it is; the last that was seen of one that is forgotten too. */
function showRequest() {
  const row = rows.find(({ id }) => id === requests.selected);
  if (!row || (chosen && !chosen.isLive)) return;
  chosen = row;
  setText(at("detail-id"), row.client_request_id ? `${row.id} (${row.client_request_id})` : row.id);
  at("waterfall").replaceChildren(drawWaterfall(row));
}

at("block-legend").append(...drawBlockLegend());
at("all-workers").addEventListener("click", () => selectWorker(null));
showWorker();
new Feed(show, lose).start();
