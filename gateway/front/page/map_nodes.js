// The topology's boxes: what each is made of, and how it is brought up to date. Three sizes of workers, one gateway.
import { blocksOf } from "./cluster_model.js";
import { draw, setAttributes, setText } from "./dom.js";
import { formatCount, formatRate } from "./format.js";

const INSET = 12;

/** A worker's box. `show(worker)` changes what has changed. */
export class WorkerNode {
  #box;
  #kind;
  #parts = {};

  constructor(worker, box, kind) {
    this.#box = box;
    this.#kind = kind;
    const name = draw("text", { class: "name" }, nameFor(worker.id, kind));
    this.#parts = { frame: draw("rect", { class: "frame", width: box.w, height: box.h, rx: kind === "card" ? 9 : 6 }), name };
    this.element = draw("g", { class: `node ${kind}`, transform: `translate(${box.x} ${box.y})`, "data-worker": worker.id });
    setAttributes(this.element, { "data-role": worker.role, role: "button", tabindex: "0" });
    this.element.append(this.#parts.frame, name);
    ({ card: () => this.#makeCard(), cell: () => this.#makeSmall(10, 20, 9, 34, 6), dot: () => this.#makeSmall(5, 16, 6, 23, 3) })[kind]();
  }

  #makeCard() {
    const { w } = this.#box;
    const right = w - INSET;
    setAttributes(this.#parts.name, { x: INSET + 14, y: 22 });
    this.#add("dot", draw("circle", { class: "dot", cx: INSET + 4, cy: 17.5, r: 4 }));
    this.#add("tag", text("tag", right, 22, "end"));
    this.#addBars(32, 12, 74, 8, w - 2 * INSET, INSET);
    this.#add("blocks", text("figure", right, 60, "end"));
    this.#add("blocksName", text("label", INSET, 60, "start", "blocks in use"));
    this.#add("batch", text("figure", INSET, 98));
    this.#add("step", text("figure", right, 98, "end"));
    this.#add("queue", text("label", INSET, 114));
    this.#add("speed", text("label", right, 114, "end"));
  }

  #makeSmall(inset, blocksY, blocksH, batchY, batchH) {
    setAttributes(this.#parts.name, { x: inset, y: this.#kind === "cell" ? 15 : 12 });
    this.#addBars(blocksY, blocksH, batchY, batchH, this.#box.w - 2 * inset, inset);
  }

  #addBars(blocksY, blocksH, batchY, batchH, width, x) {
    this.#parts.pool = new Pool(x, blocksY, width, blocksH);
    this.#parts.fill = new Fill(x, batchY, width, batchH);
    this.element.append(this.#parts.pool.element, this.#parts.fill.element);
  }

  #add(name, element) {
    this.#parts[name] = element;
    this.element.append(element);
  }

  show(worker, isSelected) {
    const { load, record, state, tag } = worker;
    const { num_used, num_blocks } = blocksOf(worker);
    const parts = this.#parts;
    parts.pool.show(worker);
    parts.fill.show(load.num_running, record.max_batch);
    const about = `${worker.role} worker ${worker.id}, ${tag || "up"}: ${num_used} of ${num_blocks} blocks in use, batch ${load.num_running} of ${record.max_batch}, ${load.num_waiting} waiting`;
    setAttributes(this.element, { "data-state": state, "aria-label": about, "aria-pressed": isSelected });
    if (this.#kind !== "card") return;
    const { isThere } = worker;
    setText(parts.tag, tag || (load.num_suspended ? `${load.num_suspended} suspended` : ""));
    setText(parts.blocks, isThere ? `${formatCount(num_used)} / ${formatCount(num_blocks)}` : "–");
    setText(parts.batch, isThere ? `batch ${load.num_running} / ${record.max_batch}` : "batch –");
    setText(parts.step, isThere && load.step_s ? `${(load.step_s * 1000).toFixed(1)} ms/step` : "");
    setText(parts.queue, isThere ? waitingOf(load) : "");
    setText(parts.speed, isThere && load.tokens_per_s ? `${formatRate(load.tokens_per_s)} tokens/s` : "");
  }
}

function waitingOf({ num_waiting, num_queued_tokens }) {
  const tokens = num_queued_tokens ? `, ${formatCount(num_queued_tokens)} tokens` : "";
  return `${num_waiting} waiting${tokens}`;
}

/** What tells it from its neighbours, where there is no room for all of it. */
function nameFor(id, kind) {
  const room = { card: 24, cell: 14, dot: 7 }[kind];
  const short = id.replace(/^(prefill|decode)-/, kind === "dot" ? "" : "$1-");
  return short.length <= room ? short : `…${short.slice(1 - room)}`;
}

/** A pool's blocks as parts of one bar, each state with its colour. */
class Pool {
  #segments = new Map();

  constructor(x, y, width, height) {
    this.#width = width;
    this.element = draw("g", { class: "pool", transform: `translate(${x} ${y})` }, draw("rect", { class: "track", width, height, rx: 3 }));
    this.#height = height;
  }

  #width;
  #height;

  show(worker) {
    const { counts, num_blocks } = blocksOf(worker);
    let x = 0;
    for (const [state, count] of counts) {
      const width = num_blocks ? (this.#width * count) / num_blocks : 0;
      setAttributes(this.#segment(state), { x: x.toFixed(2), width: width.toFixed(2), "data-count": count });
      x += width;
    }
  }

  #segment(state) {
    let segment = this.#segments.get(state);
    if (!segment) {
      segment = draw("rect", { "data-blocks": state, height: this.#height });
      this.#segments.set(state, segment);
      this.element.append(segment);
    }
    return segment;
  }
}

/** A batch's places, and how many are taken. */
class Fill {
  #width;
  #taken;

  constructor(x, y, width, height) {
    this.#width = width;
    this.#taken = draw("rect", { class: "taken", width: 0, height, rx: Math.min(height / 2, 3) });
    const track = draw("rect", { class: "track", width, height, rx: Math.min(height / 2, 3) });
    this.element = draw("g", { class: "fill", transform: `translate(${x} ${y})` }, track, this.#taken);
  }

  show(count, most) {
    setAttributes(this.#taken, { width: (most ? this.#width * Math.min(count / most, 1) : 0).toFixed(2), "data-count": count });
  }
}

/** The gateway's box. */
export class GatewayNode {
  #figures = {};

  constructor(box) {
    const middle = box.w / 2;
    const frame = draw("rect", { class: "frame", width: box.w, height: box.h, rx: 9 });
    const name = text("name", middle, 24, "middle", "gateway");
    this.element = draw("g", { class: "node gateway", transform: `translate(${box.x} ${box.y})` }, frame, name);
    this.#figures.running = this.#add("big", middle, 60, "running");
    this.#figures.rate = this.#add("label", middle, 98);
    this.#figures.refused = this.#add("label", middle, 114);
  }

  #add(kind, x, y, unit = "") {
    const figure = text(kind, x, y, "middle");
    this.element.append(figure);
    if (unit) this.element.append(text("label", x, y + 17, "middle", unit));
    return figure;
  }

  show({ num_requests, per_second }) {
    setText(this.#figures.running, formatCount(num_requests));
    setText(this.#figures.rate, `${formatRate(per_second.requests)} done/s`);
    setText(this.#figures.refused, per_second.refusals ? `${formatRate(per_second.refusals)} refused/s` : "none refused");
    this.#figures.refused.classList.toggle("bad", per_second.refusals > 0);
  }
}

export function text(kind, x, y, anchor = "start", content = "") {
  return draw("text", { class: kind, x, y, "text-anchor": anchor }, content);
}
