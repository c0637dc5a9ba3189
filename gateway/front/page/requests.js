// The table of requests: those that run above those that ended. Rows stay where they are while somebody points at them.
import { make, setAttributes, setText } from "./dom.js";
import { formatCount, formatMs } from "./format.js";
import { STAGES } from "./timing.js";
import { STAGE_NAMES } from "./stages.js";

const [MAX_LIVE, MAX_ENDED] = [60, 200];
const GOOD = ["stop", "length", "tool_calls"];

/** Rows as the table and the waterfall want them, of a view and of the ended requests that are known. */
export function rowsOf(view, recent) {
  return [...view.requests.map(toLive), ...recent.map(toEnded)];
}

function toLive(request) {
  const { stages, prefill_worker_id, decode_worker_id, connector, num_attempts, num_preemptions, causes } = request;
  const served = { prefill_worker_id, decode_worker_id, connector, num_attempts, num_preemptions, causes, kv_bytes: request.num_kv_bytes };
  return { ...request, id: request.request_id, isLive: true, isError: false, state: STAGE_NAMES[request.stage], stage: request.stage, timing: { ...stages, ...served } };
}

function toEnded(request) {
  const isError = !GOOD.includes(request.outcome) && request.outcome !== "cancelled";
  return { ...request, id: request.request_id, isLive: false, isError, state: request.outcome, stage: "" };
}

/** Calls `onSelect(id)`. */
export class Requests {
  #body;
  #note;
  #rows = new Map();
  worker = null;
  selected = null;

  constructor(body, note, onSelect) {
    this.#body = body;
    this.#note = note;
    body.addEventListener("click", (event) => {
      const id = event.target.closest("tr")?.dataset.request;
      if (id) onSelect(id);
    });
    body.addEventListener("keydown", moveBetweenRows);
  }

  show(view, rows) {
    const wanted = this.#wanted(rows);
    const isHeld = this.#rows.size > 0 && this.#body.matches(":hover, :has(:focus-visible)");
    if (!isHeld) this.#arrange(wanted);
    for (const row of rows) this.#rows.get(row.id)?.show(row, row.id === this.selected);
    const shown = isHeld ? "held while you point at it" : `${wanted.length} shown`;
    setText(this.#note, `${formatCount(view.num_requests)} running, the last ${rows.length - view.requests.length} that ended; ${shown}`);
  }

  #wanted(rows) {
    const ofWorker = ({ prefill_worker_id, decode_worker_id, timing }) =>
      [prefill_worker_id ?? timing.prefill_worker_id, decode_worker_id ?? timing.decode_worker_id].includes(this.worker);
    const wanted = this.worker ? rows.filter(ofWorker) : rows;
    return [...wanted.filter(({ isLive }) => isLive).slice(0, MAX_LIVE), ...wanted.filter(({ isLive }) => !isLive).slice(0, MAX_ENDED)];
  }

  /** Rows in their order, each moved only if it is not in its place. */
  #arrange(wanted) {
    const ids = new Set(wanted.map(({ id }) => id));
    for (const [id, row] of this.#rows) if (!ids.has(id)) (row.element.remove(), this.#rows.delete(id));
    let place = this.#body.firstChild;
    for (const { id } of wanted) {
      if (!this.#rows.has(id)) this.#rows.set(id, new Row(id));
      const { element } = this.#rows.get(id);
      if (element === place) place = place.nextSibling;
      else this.#body.insertBefore(element, place);
    }
  }
}

class Row {
  #cells;
  #parts;

  constructor(id) {
    this.#parts = Object.fromEntries(Object.keys(STAGES).map((stage) => [stage, make("span", { "data-stage": stage })]));
    const button = make("button", { type: "button", title: id, "aria-label": `Request ${id}: show its waterfall` }, id.slice(0, 8));
    const cell = (kind = "") => make("td", { class: kind });
    const bar = make("div", { class: "bar", "aria-hidden": "true" }, ...Object.values(this.#parts));
    const figures = ["number", "number", "number", "number"].map(cell);
    this.#cells = [cell("state"), cell("path"), ...figures];
    this.element = make("tr", { "data-request": id }, make("td", {}, button), ...this.#cells, make("td", {}, bar));
  }

  show(row, isSelected) {
    const { timing, isLive } = row;
    const path = [timing.prefill_worker_id, timing.decode_worker_id].filter(Boolean).join(" → ");
    const hasFirst = row.num_tokens > 0;
    const first = hasFirst ? formatMs(timing.time_to_first_token_s) : "–";
    const values = [stateOf(row), path || "–", formatCount(row.num_prompt_tokens), formatCount(row.num_tokens), first, formatMs(timing.total_s)];
    values.forEach((value, at) => setText(this.#cells[at], value));
    for (const [stage, part] of Object.entries(this.#parts)) part.style.flexGrow = timing.total_s ? (timing[stage] / timing.total_s).toFixed(4) : 0;
    setAttributes(this.element, { "data-live": isLive, "data-error": row.isError, "aria-selected": isSelected });
    setAttributes(this.#cells[0], { "data-stage": row.stage });
  }
}

/** The arrow keys go from row to row. */
function moveBetweenRows(event) {
  const steps = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" };
  const next = event.target.closest("tr")?.[steps[event.key]];
  if (!next) return;
  event.preventDefault();
  next.querySelector("button").focus();
}

function stateOf({ state, timing }) {
  return timing.num_attempts > 1 ? `${state}, ${timing.num_attempts} attempts` : state;
}
