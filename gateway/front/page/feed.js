// What the gateway tells of the cluster, each second while the page is looked at. Knows nothing of how it is shown.

const EVERY_MS = 1000;
const ANSWER_MS = 4000;
const MAX_KEPT = 256;

/** Calls `onView(view, recent)` with each answer and with all ended requests that are known, the newest first, and
 * `onLost(since, reason)` when there is none. */
export class Feed {
  #onView;
  #onLost;
  #gateway = null;
  #recent = [];
  #lostSince = null;
  #timer = null;
  #isAsking = false;

  constructor(onView, onLost) {
    this.#onView = onView;
    this.#onLost = onLost;
  }

  start() {
    document.addEventListener("visibilitychange", () => this.#resume());
    this.#resume();
  }

  #resume() {
    clearTimeout(this.#timer);
    this.#timer = null;
    if (!document.hidden && !this.#isAsking) this.#ask();
  }

  async #ask() {
    const began = performance.now();
    this.#isAsking = true;
    try {
      this.#take(await this.#fetch());
      this.#lostSince = null;
    } catch (error) {
      this.#lostSince ??= new Date();
      this.#onLost(this.#lostSince, error);
    }
    this.#isAsking = false;
    const pause = Math.max(EVERY_MS - (performance.now() - began), EVERY_MS / 4);
    this.#timer = document.hidden ? null : setTimeout(() => this.#ask(), pause);
  }

  async #fetch() {
    const view = await this.#get(this.#recent[0]?.sequence ?? 0);
    if (this.#gateway === null || view.gateway_id === this.#gateway) return view;
    this.#recent = []; // another gateway has other numbers
    return this.#get(0);
  }

  async #get(after) {
    const options = { headers: { accept: "application/json" }, signal: AbortSignal.timeout(ANSWER_MS) };
    const response = await fetch(`cluster?after=${after}`, options);
    if (!response.ok) throw new Error(`status ${response.status}`);
    return response.json();
  }

  #take(view) {
    this.#gateway = view.gateway_id;
    const last = this.#recent[0]?.sequence ?? 0;
    this.#recent = [...view.recent.filter(({ sequence }) => sequence > last), ...this.#recent].slice(0, MAX_KEPT);
    this.#onView(view, this.#recent);
  }
}
