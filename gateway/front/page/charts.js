// The last two minutes as small charts: an axis with its unit, a scale, and the figure of now.
import { draw, make, setAttributes, setText } from "./dom.js";
import { formatBytes, formatCount, formatDuration, formatRate } from "./format.js";

const [HEIGHT, LEFT, TOP, BOTTOM] = [108, 44, 8, 20];
/** Each with its lines: the history that it draws, what it is called, and its figure of now. */
const CHARTS = [
  rateChart("requests/s", ["requests", "ended", "requests"], ["refused", "refused", "refusals"]),
  rateChart("output tokens/s", ["output_tokens", "", "output_tokens"]),
  rateChart("prompt tokens/s", ["prompt_tokens", "", "prompt_tokens"]),
  { ...rateChart("KV bytes/s", ["kv_bytes", "", "kv_bytes"]), format: formatBytes, tick: formatBytes, isBinary: true },
  latencyChart("time to first token", "first_token"),
  latencyChart("time between tokens", "gap"),
];

function rateChart(name, ...series) {
  const lines = series.map(([history, label, rate]) => ({ history, label, now: ({ per_second }) => per_second[rate] }));
  return { name, about: "mean of the last 5 s; the line: each second", lines, format: formatRate, tick: (value) => formatCount(value, 1) };
}

function latencyChart(name, kind) {
  const lines = ["p50", "p99"].map((label) => ({ history: `${kind}_${label}_s`, label, now: ({ latencies }) => latencies[`${kind}_s`][label] }));
  return { name, about: "of the last minute; the lines: each second", lines, format: formatDuration, tick: formatTick };
}

function formatTick(seconds) {
  return seconds >= 1 ? `${+seconds.toFixed(1)} s` : `${+(seconds * 1000).toFixed(1)} ms`;
}

export class Charts {
  #charts;

  constructor(element) {
    this.#charts = CHARTS.map((about) => new Chart(about));
    element.append(...this.#charts.map((chart) => chart.element));
  }

  show(view) {
    for (const chart of this.#charts) chart.show(view);
  }
}

class Chart {
  #about;
  #figures;
  #svg = draw("svg", { height: HEIGHT, "aria-hidden": "true" });
  #parts = {};

  constructor(about) {
    this.#about = about;
    this.#figures = about.lines.map(() => make("b", {}));
    const now = about.lines.map(({ label }, at) => make("li", label ? { "data-line": at } : {}, label ? `${label} ` : "", this.#figures[at]));
    this.element = make("figure", { class: "panel chart", title: about.about }, make("figcaption", {}, about.name), make("ul", { class: "now" }, ...now), this.#svg);
  }

  show(view) {
    this.#about.lines.forEach(({ now }, at) => {
      const value = now(view);
      setText(this.#figures[at], value === null ? "–" : this.#about.format(value));
    });
    this.#drawLines(view.history);
  }

  #drawLines(history) {
    const width = Math.max(Math.floor(this.#svg.getBoundingClientRect().width), 120);
    const series = this.#about.lines.map((line) => history[line.history]);
    const most = niceAbove(Math.max(...series.flat().map((value) => value ?? 0)), this.#about.isBinary);
    const scale = { width, most, length: series[0].length };
    const signature = JSON.stringify([width, most]);
    if (this.#parts.signature !== signature) this.#drawAxes(scale, signature);
    series.forEach((values, at) => setAttributes(this.#parts.lines[at], { d: pathOf(values, scale) }));
    setAttributes(this.#parts.area, { d: series.length === 1 ? areaOf(series[0], scale) : "" });
  }

  #drawAxes(scale, signature) {
    const { width, most } = scale;
    const ticks = [0, most / 2, most].flatMap((value) => drawTick(value, scale, this.#about.tick));
    const times = [[LEFT, "start", "−2 min"], [(LEFT + width) / 2, "middle", "−1 min"], [width, "end", "now"]];
    const labels = times.filter(([, anchor]) => anchor !== "middle" || width > 170).map(([x, anchor, label]) => draw("text", { x, y: HEIGHT - 5, "text-anchor": anchor }, label));
    const area = draw("path", { class: "area" });
    const lines = this.#about.lines.map((_, at) => draw("path", { class: "line", "data-line": at }));
    setAttributes(this.#svg, { viewBox: `0 0 ${width} ${HEIGHT}` });
    this.#svg.replaceChildren(...ticks, ...labels, area, ...lines);
    this.#parts = { signature, area, lines };
  }
}

function drawTick(value, scale, format) {
  const y = yOf(value, scale);
  const line = draw("line", { class: "grid", x1: LEFT, x2: scale.width, y1: y, y2: y });
  return [line, draw("text", { x: LEFT - 6, y: y + 3.5, "text-anchor": "end" }, value ? format(value) : "0")];
}

const xOf = (at, { width, length }) => LEFT + ((width - LEFT - 2) * at) / (length - 1);
const yOf = (value, { most }) => HEIGHT - BOTTOM - ((HEIGHT - BOTTOM - TOP) * value) / most;
const pointOf = (value, at, scale) => `${xOf(at, scale).toFixed(1)} ${yOf(value, scale).toFixed(1)}`;

/** Seconds in which nothing was measured are skipped; after ten of them another line begins. */
function pathOf(values, scale) {
  let last = -Infinity;
  return values
    .map((value, at) => {
      if (value === null) return "";
      const isNew = at - last > 10;
      last = at;
      return isNew ? `M${pointOf(value, at, scale)}h0.1` : `L${pointOf(value, at, scale)}`;
    })
    .join("");
}

function areaOf(values, scale) {
  const [first, end] = [xOf(0, scale), xOf(values.length - 1, scale)];
  const bottom = yOf(0, scale);
  return `M${first} ${bottom}${values.map((value, at) => `L${pointOf(value, at, scale)}`).join("")}L${end} ${bottom}Z`;
}

/** The scale's end: 1, 2 or 5 of a power of ten, or a power of two of bytes; it changes seldom. */
function niceAbove(value, isBinary) {
  if (isBinary) return 2 ** Math.max(Math.ceil(Math.log2(Math.max(value, 1))), 10);
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((most) => most >= value);
}
