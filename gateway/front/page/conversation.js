// Questions and answers as they are shown.
import { make } from "./dom.js";
import { drawTiming } from "./timing.js";

export function drawQuestion(text) {
  return make("article", { class: "question", "aria-label": "You" }, make("p", { class: "text" }, text));
}

/** One answer, growing event by event. `element` is what is shown of it. */
export class Answer {
  constructor(model) {
    this.content = "";
    this._text = document.createTextNode("");
    this._reason = "";
    this._timing = null;
    this._usage = null;
    this._body = make("p", { class: "text" }, this._text);
    this.element = make("article", { class: "answer", "aria-label": model, "aria-busy": "true" }, this._body);
  }

  /** What an event of the stream adds; its text is not shown yet. */
  take(event) {
    const choice = event.choices[0];
    this.content += choice?.delta.content ?? "";
    this._reason = choice?.finish_reason ?? this._reason;
    this._timing = event.timing ?? this._timing;
    this._usage = event.usage ?? this._usage;
  }

  show() {
    this._text.appendData(this.content.slice(this._text.length));
  }

  /** The stream has ended: by itself, or with `note` to say why it did not. */
  end(note = "", kind = "note") {
    this.show();
    this.element.setAttribute("aria-busy", "false");
    if (note) this.element.append(make("p", { class: `badge ${kind}` }, note));
    if (this._timing) this.element.append(drawTiming(this._timing, this._usage, this._reason));
  }
}
