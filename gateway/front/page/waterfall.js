// One request's stages as a waterfall: each begins where the one before it ended, and they add up to the total.
import { make } from "./dom.js";
import { formatBytes, formatDuration } from "./format.js";
import { badgesOf, STAGES } from "./timing.js";

const NUM_TICKS = 4;

/** Of a row of the table: one that ended, or one that still runs. */
export function drawWaterfall(row) {
  const { timing } = row;
  const scale = scaleOf(timing.total_s);
  return make(
    "div",
    { class: "waterfall", "data-request": row.id, "data-total": timing.total_s },
    make("p", { class: "figures" }, ...figuresOf(row).map(([name, value]) => make("span", { "data-figure": name }, make("b", {}, `${value}`), ` ${name}`))),
    make("ol", {}, ...drawStages(timing, scale), drawAxis(scale)),
    drawServers(row),
    drawBadges(row),
  );
}

function figuresOf({ timing, isLive, num_tokens, num_prompt_tokens, num_cached_tokens }) {
  const hasFirst = !isLive || num_tokens > 0;
  return [
    [isLive ? "so far" : "total", formatDuration(timing.total_s)],
    ["first token", hasFirst ? formatDuration(timing.time_to_first_token_s) : "–"],
    ["prompt tokens", num_prompt_tokens],
    ["cached", num_cached_tokens],
    ["output tokens", num_tokens],
  ];
}

function drawStages(timing, scale) {
  let begin = 0;
  return Object.entries(STAGES).map(([stage, name]) => {
    const bar = make("span", { class: "part" });
    bar.style.left = `${(100 * begin) / scale.most}%`;
    bar.style.width = `${(100 * timing[stage]) / scale.most}%`;
    begin += timing[stage];
    const track = make("span", { class: "track" }, ...drawGrid(scale), bar);
    const attributes = { "data-stage": stage, "data-seconds": timing[stage] };
    return make("li", attributes, make("span", { class: "stage" }, name), track, make("b", {}, formatDuration(timing[stage])));
  });
}

function drawGrid({ ticks, most }) {
  return ticks.map((value) => {
    const line = make("i");
    line.style.left = `${(100 * value) / most}%`;
    return line;
  });
}

function drawAxis({ ticks, most, unit, factor }) {
  const labels = ticks.map((value) => {
    const label = make("span", {}, `${+(value * factor).toPrecision(3)}`);
    label.style.left = `${(100 * value) / most}%`;
    return label;
  });
  return make("li", { class: "axis", "aria-hidden": "true" }, make("span", { class: "stage" }, `${unit} from arrival`), make("span", { class: "ticks" }, ...labels), make("b", {}, ""));
}

function scaleOf(total_s) {
  const most = Math.max(total_s, 1e-4);
  const rough = most / NUM_TICKS;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((wide) => wide >= rough);
  const ticks = Array.from({ length: Math.floor(most / step) + 1 }, (_, at) => at * step);
  return most >= 2 ? { most, ticks, unit: "s", factor: 1 } : { most, ticks, unit: "ms", factor: 1000 };
}

function drawServers({ timing }) {
  const { prefill_worker_id, decode_worker_id, connector, kv_bytes } = timing;
  const path = make("p", { class: "path" });
  if (prefill_worker_id) path.append(make("code", {}, prefill_worker_id));
  if (connector) path.append(make("span", { class: "hop" }, `${connector}, ${formatBytes(kv_bytes)}`));
  if (decode_worker_id) path.append(make("code", {}, decode_worker_id));
  return path;
}

function drawBadges({ timing, state, isLive, isError }) {
  const badges = badgesOf(timing, "").map(([kind, text]) => make("span", { class: `badge ${kind}` }, text));
  const outcome = make("span", { class: `badge ${isError ? "error" : ""}` }, isLive ? `now: ${state}` : `ended: ${state}`);
  return make("p", { class: "badges" }, outcome, ...badges);
}
