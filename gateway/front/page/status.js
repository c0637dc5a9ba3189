// What is served, and whether it can be: asked again while the page is looked at.

const EVERY_MS = 3000;
const modelName = document.getElementById("model");
const context = document.getElementById("context");
const status = document.getElementById("status");

/** The model's id, once the server has told it. */
export let model = "";

export function watchStatus() {
  refresh();
  setInterval(() => document.hidden || refresh(), EVERY_MS);
  document.addEventListener("visibilitychange", () => document.hidden || refresh());
}

async function refresh() {
  try {
    const isReady = (await fetch("ready")).ok;
    show(isReady ? "ready" : "waiting", isReady ? await countWorkers() : "not ready");
    await showModel();
  } catch {
    show("lost", "no answer");
  }
}

function show(state, text) {
  if (status.textContent !== text) status.textContent = text; // a screen reader hears changes only
  status.dataset.state = state;
}

async function countWorkers() {
  const { workers } = await getJson(`cluster?after=${Number.MAX_SAFE_INTEGER}`); // nothing of what ended
  const count = (role) => workers.filter((worker) => worker.is_up && worker.record.role === role).length;
  return `ready: ${count("prefill")} prefill, ${count("decode")} decode`;
}

async function showModel() {
  const [first] = (await getJson("v1/models")).data;
  model = first.id;
  modelName.textContent = first.id;
  context.textContent = first.max_model_len ? `${first.max_model_len} tokens` : "";
}

async function getJson(path) {
  const response = await fetch(path);
  return response.json();
}
