// The lines between the topology's boxes: which there are, where they run, how much moves along each.
import { levelOf } from "./cluster_model.js";

const [MOST_PROMPT_TOKENS, MOST_TOKENS, MOST_KIB] = [20_000, 5_000, 4 << 20]; // a second: beyond, faster looks the same

/** Each with a key, a path and its ends. Between single workers where each has a box of its own, else between tiers. */
export function edgesOf(layout, tiers) {
  const [prefill, decode] = tiers.map((workers, tier) => (layout.tiers[tier] ? anchorsOf(layout, tier, workers) : []));
  const prompts = (layout.tiers[0] ? prefill : decode).map((end) => ({ kind: "prompts", to: end, path: between(layout, layout.gateway, end.box) }));
  const kv = prefill.flatMap((from) => decode.map((to) => ({ kind: "kv", from, to, path: between(layout, from.box, to.box) })));
  const tokens = decode.map((from) => ({ kind: "tokens", from, path: out(layout, from.box) }));
  const all = { name: "*", box: decode[0]?.box ?? layout.tiers[1], ids: null };
  return [...prompts, ...kv, ...tokens, { kind: "tokens", from: all, to: { name: "gateway" }, path: back(layout, all.box) }].map((edge) => ({ ...edge, key: keyOf(edge) }));
}

function keyOf({ kind, from, to }) {
  return [kind, from?.name ?? "", to?.name ?? ""].join(" ");
}

function anchorsOf({ tiers, isNarrow }, tier, workers) {
  const { kind, nodes } = tiers[tier];
  if (isNarrow || kind !== "card") return [{ name: "*", box: tiers[tier], ids: null }];
  return workers.map((worker, at) => ({ name: worker.id, box: nodes[at], ids: new Set([worker.id]), role: worker.role }));
}

function between({ isNarrow }, from, to) {
  if (isNarrow) {
    const x = from.x + from.w / 2;
    return `M${x} ${from.y + from.h}L${x} ${to.y}`;
  }
  const [x1, y1, x2, y2] = [from.x + from.w, from.y + from.h / 2, to.x, to.y + to.h / 2];
  const bend = (x2 - x1) / 2;
  return `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
}

/** To where all that was generated goes together. */
function out({ bus }, from) {
  return `M${from.x + from.w} ${from.y + from.h / 2}H${bus.x}`;
}

/** From there to the gateway, around everything else. */
function back({ isNarrow, gateway, bus }, first) {
  const [y, r] = [first.y + first.h / 2, 10];
  if (isNarrow) {
    const top = gateway.y + gateway.h / 2;
    return `M${bus.x} ${y}V${top + r}q0 ${-r} ${-r} ${-r}H${gateway.x + gateway.w}`;
  }
  const middle = gateway.x + gateway.w / 2;
  const end = gateway.y + gateway.h;
  return `M${bus.x} ${y}V${bus.y - r}q0 ${r} ${-r} ${r}H${middle + r}q${-r} 0 ${-r} ${-r}V${end}`;
}

/** How much moves along each edge now, 0 to 1, by its key. */
export function levelsOf(edges, view) {
  const there = new Set(view.workers.filter(({ is_up }) => is_up).map(({ record }) => record.worker_id));
  const isOpen = ({ from, to }) => [from, to].every((end) => !end?.ids || [...end.ids].some((id) => there.has(id)));
  return new Map(edges.map((edge) => [edge.key, isOpen(edge) ? level(edge, view) : 0]));
}

function level({ kind, from, to }, view) {
  if (kind === "kv") {
    const bytes = sum(view.flows.filter((flow) => joins(from, flow.prefill_worker_id) && joins(to, flow.decode_worker_id)));
    return levelOf(bytes / 1024, MOST_KIB);
  }
  if (kind === "prompts") return levelOf(view.per_second.prompt_tokens * shareOf(to, view, to.role), MOST_PROMPT_TOKENS);
  return levelOf(view.per_second.output_tokens * shareOf(from, view, "decode"), MOST_TOKENS);
}

function joins(end, worker_id) {
  return end.ids === null || end.ids.has(worker_id);
}

function sum(flows) {
  return flows.reduce((total, flow) => total + flow.bytes_per_s, 0);
}

/** A worker's part in what its tier does: of the KV bytes, or of what runs there while none cross. */
function shareOf(end, view, role) {
  if (end.ids === null) return 1;
  const total = sum(view.flows);
  if (total) return sum(view.flows.filter((flow) => joins(end, flow[`${role}_worker_id`]))) / total;
  const running = view.workers.filter(({ record }) => record.role === role);
  const count = (workers) => workers.reduce((number, { load }) => number + load.num_running, 0);
  return count(running.filter(({ record }) => joins(end, record.worker_id))) / Math.max(count(running), 1);
}
