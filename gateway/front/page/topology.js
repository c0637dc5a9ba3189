// The cluster as a drawing: boxes that fill up, lines along which something moves as fast as it does.
import { workersOf } from "./cluster_model.js";
import { draw, setAttributes, setText } from "./dom.js";
import { formatBytes, formatRate } from "./format.js";
import { edgesOf, levelsOf } from "./map_edges.js";
import { place } from "./map_layout.js";
import { GatewayNode, text, WorkerNode } from "./map_nodes.js";

const ROLES = ["prefill", "decode"];
const [SLOWEST_PX_S, FASTEST_PX_S, DASH_PX] = [14, 130, 14];

/** Calls `onPoint(id)` for the worker that is pointed at or focused, with null after that, and `onSelect(id)`. */
export class Topology {
  #svg;
  #view = null;
  #drawn = "";
  #nodes = new Map();
  #edges = [];
  #lines = new Map();
  #headings = {};
  #gateway = null;
  #frame_ms = null;
  selected = null;

  constructor(svg, onPoint, onSelect) {
    this.#svg = svg;
    const idOf = (event) => event.target.closest("[data-worker]")?.dataset.worker ?? null;
    for (const kind of ["pointerover", "focusin"]) svg.addEventListener(kind, (event) => onPoint(idOf(event)));
    for (const kind of ["pointerleave", "focusout"]) svg.addEventListener(kind, () => onPoint(null));
    svg.addEventListener("click", (event) => onSelect(idOf(event)));
    svg.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      onSelect(idOf(event));
    });
    new ResizeObserver(() => this.#view && this.show(this.#view)).observe(svg.parentElement);
    if (!matchMedia("(prefers-reduced-motion: reduce)").matches) requestAnimationFrame((now) => this.#move(now));
  }

  show(view) {
    this.#view = view;
    const tiers = ROLES.map((role) => workersOf(view, role));
    const width = Math.floor(this.#svg.getBoundingClientRect().width);
    const wanted = JSON.stringify([width, tiers.map((workers) => workers.map((worker) => worker.id))]);
    if (wanted !== this.#drawn) this.#draw(width, tiers);
    this.#drawn = wanted;
    this.#gateway.show(view);
    for (const worker of tiers.flat()) this.#nodes.get(worker.id).show(worker, worker.id === this.selected);
    this.#showHeadings(view, tiers);
    this.#showFlows(view);
  }

  /** Everything anew: another width, or other workers. */
  #draw(width, tiers) {
    const focused = this.#svg.contains(document.activeElement) ? document.activeElement.dataset.worker : null;
    const layout = place(width, tiers.map((workers) => workers.length));
    setAttributes(this.#svg, { viewBox: `0 0 ${width} ${layout.height}`, height: layout.height });
    this.#edges = edgesOf(layout, tiers);
    this.#lines = new Map(this.#edges.map((edge) => [edge.key, new Line(edge)]));
    this.#gateway = new GatewayNode(layout.gateway);
    this.#nodes = new Map();
    tiers.forEach((workers, tier) => {
      if (!layout.tiers[tier]) return;
      const { kind, nodes } = layout.tiers[tier];
      workers.forEach((worker, at) => this.#nodes.set(worker.id, new WorkerNode(worker, nodes[at], kind)));
    });
    this.#headings = Object.fromEntries(Object.entries(layout.headings).filter(([, at]) => at).map(([name, at]) => [name, new Heading(name, at)]));
    const frames = layout.tiers.filter(Boolean).filter(({ kind, nodes }) => kind !== "card" || !nodes.length).map(drawTier);
    this.#svg.replaceChildren(
      ...[...this.#lines.values()].map(({ element }) => element),
      ...frames,
      this.#gateway.element,
      ...[...this.#nodes.values()].map(({ element }) => element),
      ...Object.values(this.#headings).map(({ element }) => element),
    );
    if (focused) this.#nodes.get(focused)?.element.focus();
  }

  #showHeadings(view, [prefill, decode]) {
    const { per_second } = view;
    const count = (workers) => `${workers.filter(({ isThere }) => isThere).length} of ${workers.length} up`;
    this.#headings.prompts.show("prompt tokens", `${formatRate(per_second.prompt_tokens)} /s`);
    this.#headings.prefill?.show("prefill workers", count(prefill));
    this.#headings.kv?.show("KV blocks", `${formatBytes(per_second.kv_bytes)}/s`);
    this.#headings.decode.show(this.#headings.kv ? "decode workers" : "workers", count(decode));
    this.#headings.tokens.show("output tokens", `${formatRate(per_second.output_tokens)} /s`);
  }

  #showFlows(view) {
    for (const [key, level] of levelsOf(this.#edges, view)) this.#lines.get(key).show(level);
  }

  #move(now_ms) {
    const passed_s = Math.min(now_ms - (this.#frame_ms ?? now_ms), 100) / 1000;
    this.#frame_ms = now_ms;
    if (!document.body.classList.contains("lost")) for (const line of this.#lines.values()) line.move(passed_s);
    requestAnimationFrame((now) => this.#move(now));
  }
}

/** One edge: a faint line that is always there, and what moves along it. */
class Line {
  #moving;
  #level = 0;
  #offset = 0;

  constructor({ kind, key, path }) {
    this.#moving = draw("path", { class: "moving", d: path });
    this.element = draw("g", { class: "edge", "data-kind": kind, "data-edge": key }, draw("path", { class: "way", d: path }), this.#moving);
  }

  show(level) {
    this.#level = level;
    setAttributes(this.element, { "data-level": level.toFixed(2) });
    setAttributes(this.#moving, { "stroke-width": (2 + 4 * level).toFixed(1) });
  }

  move(passed_s) {
    if (!this.#level) return;
    this.#offset = (this.#offset + passed_s * (SLOWEST_PX_S + (FASTEST_PX_S - SLOWEST_PX_S) * this.#level)) % DASH_PX;
    this.#moving.setAttribute("stroke-dashoffset", (-this.#offset).toFixed(1));
  }
}

/** What a column or a line is, and how much of it there is now; on its own ground, since lines pass behind. */
class Heading {
  #name;
  #value;

  constructor(kind, [x, y]) {
    this.#name = text("label", x, y - 3, "middle");
    this.#value = text("value", x, y + 13, "middle");
    const back = draw("rect", { class: "ground", x: x - 62, y: y - 16, width: 124, height: 34, rx: 6 });
    this.element = draw("g", { class: "heading", "data-heading": kind }, kind === "tokens" ? back : null, this.#name, this.#value);
  }

  show(name, value) {
    setText(this.#name, name);
    setText(this.#value, value);
  }
}

function drawTier({ x, y, w, h }) {
  return draw("rect", { class: "tier", x: x + 0.5, y: y + 0.5, width: w - 1, height: h - 1, rx: 10 });
}
