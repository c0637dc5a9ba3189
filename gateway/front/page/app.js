// The playground: sends the conversation, shows the answer as it comes.
import { Answer, drawQuestion } from "./conversation.js";
import { authorization, readSettings, withSystemPrompt } from "./settings.js";
import { model, watchStatus } from "./status.js";
import { streamChat } from "./stream.js";

const NEAR_END_PX = 80;
const at = (id) => document.getElementById(id);
const [scroller, conversation, intro] = [at("scroller"), at("conversation"), at("intro")];
const [composer, message, send, stop] = [at("composer"), at("message"), at("send"), at("stop")];
const [settings, showSettings] = [at("settings"), at("show-settings")];

let messages = []; // what was said so far, as the server wants it
let running = null; // aborts the answer that is coming

async function ask(text) {
  const history = messages; // stays this chat's, whatever chat is shown when the answer ends
  const controller = new AbortController();
  const answer = new Answer(model);
  const turn = [{ role: "user", content: text }];
  const request = { model, messages: withSystemPrompt(settings, [...history, ...turn]), ...readSettings(settings) };
  const showSoon = oncePerFrame(() => keepingEnd(() => answer.show()));
  begin(controller, drawQuestion(text), answer.element);
  try {
    for await (const event of streamChat(request, controller.signal, authorization(settings))) {
      answer.take(event);
      showSoon();
    }
    keepingEnd(() => answer.end());
  } catch (error) {
    keepingEnd(() => answer.end(...whyEnded(error, controller)));
    if (!answer.content && !message.value) message.value = text; // to try again
  }
  if (answer.content) history.push(...turn, { role: "assistant", content: answer.content });
  if (running === controller) end();
}

function whyEnded(error, controller) {
  if (controller.signal.aborted) return ["stopped"];
  if (error.field) settings.elements[error.field]?.setAttribute("aria-invalid", "true");
  return [error.code ? `${error.code}: ${error.message}` : `no answer: ${error.message}`, "error"];
}

function begin(controller, ...shown) {
  running = controller;
  intro.hidden = true;
  conversation.append(...shown);
  scroller.scrollTop = scroller.scrollHeight;
  settings.querySelectorAll("[aria-invalid]").forEach((field) => field.removeAttribute("aria-invalid"));
  showRunning(true);
}

function end() {
  running = null;
  showRunning(false);
}

function showRunning(isRunning) {
  const hadFocus = document.activeElement === stop;
  send.hidden = isRunning;
  stop.hidden = !isRunning;
  if (hadFocus) message.focus();
}

/** Whoever reads the end keeps seeing it while the answer grows; whoever scrolled up is left alone. */
function keepingEnd(change) {
  const isNear = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_END_PX;
  change();
  if (isNear) scroller.scrollTop = scroller.scrollHeight;
}

/** `action`, however often it is asked for between two frames, runs once: tokens may come faster than they are seen. */
function oncePerFrame(action) {
  let isDue = false;
  return () => {
    if (!isDue) requestAnimationFrame(() => ((isDue = false), action()));
    isDue = true;
  };
}

function abort() {
  running?.abort();
}

function startNewChat() {
  abort();
  end();
  messages = [];
  conversation.replaceChildren();
  intro.hidden = false;
  message.focus();
}

function toggleSettings(isShown) {
  document.body.classList.toggle("settings-shown", isShown);
  showSettings.setAttribute("aria-expanded", `${isShown}`);
}

function submit(event) {
  event.preventDefault();
  const text = message.value.trim();
  if (running || !text) return;
  if (!settings.checkValidity()) {
    toggleSettings(true); // a field that is not shown cannot say what is wrong with it
    settings.reportValidity();
    return;
  }
  toggleSettings(false);
  message.value = "";
  ask(text);
}

composer.addEventListener("submit", submit);
stop.addEventListener("click", abort);
at("new-chat").addEventListener("click", startNewChat);
showSettings.addEventListener("click", () => toggleSettings(!document.body.classList.contains("settings-shown")));
message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  composer.requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") abort();
});
watchStatus(() => authorization(settings));
