// Where an answer's time went: its stages as a bar to scale, its figures, and who served it.
import { make } from "./dom.js";
import { formatBytes, formatDuration } from "./format.js";

/** In order; together they are the total. */
export const STAGES = {
  prepare_s: "prepare",
  queue_s: "queue",
  prefill_s: "prefill",
  grant_wait_s: "grant",
  transfer_s: "transfer",
  decode_queue_s: "decode queue",
  first_step_s: "first step",
  decode_s: "decode",
};
/** Why a decode worker computed the prompt itself. */
const LOCAL_PREFILL = ["no_prefill_worker", "short_prompt"];

/** The timing of one answer, from what the server reports of it at its end. */
export function drawTiming(timing, usage, finishReason) {
  const figures = make("p", { class: "figures" }, ...figuresOf(timing, usage).map(drawFigure));
  return make("div", { class: "timing" }, figures, drawBar(timing), drawLegend(timing), drawPath(timing, finishReason));
}

function figuresOf(timing, usage) {
  const figures = [
    ["total", formatDuration(timing.total_s)],
    ["first token", formatDuration(timing.time_to_first_token_s)],
  ];
  if (!usage) return figures;
  const later_s = timing.total_s - timing.time_to_first_token_s;
  const num_later = usage.completion_tokens - 1;
  if (num_later > 0 && later_s > 0) figures.push(["tokens/s", (num_later / later_s).toFixed(1)]);
  figures.push(["tokens", usage.completion_tokens], ["prompt", usage.prompt_tokens]);
  figures.push(["cached", usage.prompt_tokens_details?.cached_tokens ?? 0]);
  return figures;
}

function drawFigure([name, value]) {
  return make("span", { "data-figure": name }, make("b", {}, `${value}`), ` ${name}`);
}

/** One tab stop; arrow keys go from stage to stage. */
function drawBar(timing) {
  const label = `Stages of ${formatDuration(timing.total_s)}`;
  const bar = make("div", { class: "bar", role: "group", "aria-label": label });
  for (const [stage, name] of Object.entries(STAGES)) {
    if (timing[stage] > 0) bar.append(drawSegment(stage, name, timing));
  }
  bar.firstChild?.setAttribute("tabindex", "0");
  bar.addEventListener("keydown", moveBetweenSegments);
  return bar;
}

function drawSegment(stage, name, timing) {
  const share = ((100 * timing[stage]) / timing.total_s).toFixed(1);
  const text = `${name} ${formatDuration(timing[stage])}, ${share} %`;
  const attributes = { "data-stage": stage, "data-seconds": timing[stage], "data-text": text };
  const segment = make("span", { ...attributes, role: "img", "aria-label": text, tabindex: "-1" });
  segment.style.flexGrow = timing[stage] / timing.total_s;
  return segment;
}

function moveBetweenSegments(event) {
  const steps = { ArrowRight: "nextSibling", ArrowLeft: "previousSibling" };
  const next = event.target[steps[event.key]];
  if (!next) return;
  event.preventDefault();
  event.target.setAttribute("tabindex", "-1");
  next.setAttribute("tabindex", "0");
  next.focus();
}

function drawLegend(timing) {
  const items = Object.entries(STAGES).map(([stage, name]) =>
    make("li", { "data-stage": stage }, name, " ", make("b", {}, formatDuration(timing[stage]))),
  );
  return make("ul", { class: "legend" }, ...items);
}

/** Who served it over what, and what did not go the usual way. */
function drawPath(timing, finishReason) {
  const path = make("p", { class: "path" });
  if (timing.prefill_worker_id) path.append(make("code", {}, timing.prefill_worker_id));
  if (timing.connector) path.append(make("span", { class: "hop" }, hopOf(timing)));
  if (timing.decode_worker_id) path.append(make("code", {}, timing.decode_worker_id));
  path.append(...badgesOf(timing, finishReason).map(([kind, text]) => make("span", { class: `badge ${kind}` }, text)));
  return path;
}

function hopOf(timing) {
  return `${timing.connector}, ${formatBytes(timing.kv_bytes)}`;
}

export function badgesOf(timing, finishReason) {
  const badges = [];
  const faults = timing.causes.filter((cause) => !LOCAL_PREFILL.includes(cause));
  const local = timing.causes.find((cause) => LOCAL_PREFILL.includes(cause));
  if (local) badges.push(["note", `local prefill: ${local}`]);
  if (timing.num_attempts > 1 || faults.length) {
    badges.push(["recovered", `recovered: ${faults.join(", ") || `${timing.num_attempts} attempts`}`]);
  }
  if (finishReason === "length") badges.push(["note", "finish: length"]);
  if (timing.num_preemptions) badges.push(["note", `preempted ${timing.num_preemptions}×`]);
  return badges;
}
