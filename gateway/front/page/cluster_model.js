// The gateway's view as the page's parts want it: workers in order with their state, flows by their ends.

const SILENT_S = 2.5; // a worker says something each second
const order = new Intl.Collator("en", { numeric: true });

/** Of a pool, in the order of its bar; what is free is the rest of it. */
export const BLOCK_STATES = {
  owned: "owned: of running sequences",
  in_flight: "in flight: granted, being received",
  leased: "leased: computed, until they are handed over",
  quarantined: "quarantined: a writer may still touch them",
  cached: "cached: free, with content",
  free: "free",
};
export const IN_USE = ["owned", "in_flight", "leased", "quarantined"];

/** Every worker of a role, those that are gone in the places that they had. */
export function workersOf(view, role) {
  const there = view.workers.filter(({ record }) => record.role === role).map(toWorker);
  const gone = view.gone.filter((worker) => worker.role === role).map(toGone);
  return [...there, ...gone].sort((one, other) => order.compare(one.id, other.id));
}

function toWorker({ record, load, is_up, num_open, silent_s }) {
  const state = stateOf(is_up, load, silent_s);
  return { id: record.worker_id, role: record.role, record, load, num_open, state, tag: tagOf(state, silent_s), isThere: is_up };
}

function toGone({ worker_id, role, num_blocks, ago_s, reason }) {
  const record = { worker_id, role, num_blocks, max_batch: 0 };
  const load = { num_blocks, blocks_by_state: {}, num_running: 0, num_waiting: 0, num_queued_tokens: 0, num_suspended: 0, step_s: 0, tokens_per_s: 0 };
  const tag = `gone for ${ago_s < 60 ? "under a minute" : `${Math.floor(ago_s / 60)} min`}`;
  return { id: worker_id, role, record, load, num_open: 0, state: "gone", tag, isThere: false, reason };
}

function stateOf(isUp, load, silent_s) {
  if (!isUp) return "down";
  if (silent_s > SILENT_S) return "silent";
  return load.is_draining ? "draining" : "up";
}

function tagOf(state, silent_s) {
  return { down: "no session", silent: `silent for ${Math.round(silent_s)} s`, draining: "draining", up: "" }[state];
}

/** Of a worker's pool: how many blocks in each state, and in use. They add up to the pool. */
export function blocksOf({ load }) {
  const counts = Object.keys(BLOCK_STATES).map((state) => [state, load.blocks_by_state[state] ?? 0]);
  const num_used = IN_USE.reduce((sum, state) => sum + (load.blocks_by_state[state] ?? 0), 0);
  return { counts, num_used, num_blocks: load.num_blocks };
}

/** 0 of nothing up to 1 of `most` or more, on a logarithmic scale: what is ten times as fast looks faster. */
export function levelOf(rate, most) {
  return Math.min(Math.log1p(rate) / Math.log1p(most), 1);
}
