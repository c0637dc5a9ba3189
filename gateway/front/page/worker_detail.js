// Every number of one worker, below the topology: where a box is too small for them.
import { BLOCK_STATES, blocksOf } from "./cluster_model.js";
import { make } from "./dom.js";
import { formatCount, formatRate } from "./format.js";

const HINT = "Point at a worker, or go to it with the Tab key, for all of its numbers. Choosing one shows only its requests.";

export function drawWorker(worker) {
  if (!worker) return make("p", { class: "muted" }, HINT);
  const facts = worker.isThere ? factsOf(worker) : [["session", worker.tag], ...(worker.reason ? [["why", worker.reason]] : [])];
  return make("dl", {}, ...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, `${value}`))));
}

function factsOf(worker) {
  const { load, record, num_open } = worker;
  const { counts, num_blocks } = blocksOf(worker);
  const states = counts.filter(([, count]) => count).map(([state, count]) => `${formatCount(count)} ${state.replace("_", " ")}`);
  return [
    [worker.role, worker.id],
    ["session", worker.tag || "up"],
    [`blocks of ${formatCount(num_blocks)}`, states.join(", ")],
    ["batch", `${load.num_running} of ${record.max_batch}`],
    ["waiting", load.num_waiting],
    ["queued tokens", formatCount(load.num_queued_tokens)],
    ["suspended", load.num_suspended],
    ["open handoffs", num_open],
    ["step, ms", (load.step_s * 1000).toFixed(1)],
    ["tokens/s", formatRate(load.tokens_per_s)],
    ["address", record.address],
  ];
}

/** What the colours of a pool, and the bar below it, mean. */
export function drawBlockLegend() {
  const states = Object.entries(BLOCK_STATES).map(([state, about]) => make("li", { "data-blocks": state, title: about }, state.replace("_", " ")));
  const batch = ["prefill", "decode"].map((role) => make("li", { "data-batch": role }, `${role}ing`.replace("eing", "ing")));
  return [make("li", { class: "lead" }, "upper bar: KV blocks"), ...states, make("li", { class: "lead" }, "lower bar: batch"), ...batch];
}
