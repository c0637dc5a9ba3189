// What is in flight, by stage: a cell each, in order, that stays in its place.
import { make, setText } from "./dom.js";
import { formatCount } from "./format.js";

/** A running request's stages: that it waits for a decode step is known only when the step is over. */
export const STAGE_NAMES = {
  queue_s: "queue",
  prefill_s: "prefill",
  grant_wait_s: "grant",
  transfer_s: "transfer",
  decode_queue_s: "first step",
  decode_s: "decode",
  retry: "retry",
};
const ABOUT = {
  queue_s: "for a prefill worker",
  prefill_s: "computing the prompt",
  grant_wait_s: "for room to decode",
  transfer_s: "KV blocks moving",
  decode_queue_s: "to the second token",
  decode_s: "token after token",
  retry: "another attempt",
};

export class Stages {
  #cells = new Map();
  #total;

  constructor(list, total) {
    this.#total = total;
    for (const [stage, name] of Object.entries(STAGE_NAMES)) {
      const count = make("b", {}, "0");
      const level = make("span", { class: "level" });
      const label = make("span", { class: "stage" }, name);
      list.append(make("li", { "data-stage": stage }, label, count, make("span", { class: "about muted" }, ABOUT[stage]), make("span", { class: "track" }, level)));
      this.#cells.set(stage, { count, level });
    }
  }

  show({ num_by_stage, num_requests }) {
    setText(this.#total, formatCount(num_requests));
    for (const [stage, { count, level }] of this.#cells) {
      const number = num_by_stage[stage] ?? 0;
      setText(count, formatCount(number));
      level.style.width = `${num_requests ? (100 * number) / num_requests : 0}%`;
    }
  }
}
