// What is served, and whether it can be: asked again while the page is looked at.

const EVERY_MS = 3000;
const modelName = document.getElementById("model");
const context = document.getElementById("context");
const status = document.getElementById("status");

/** The model's id, once the server has told it. */
export let model = "";

/** `authorize()` are the headers that the server may want, as they are at the moment. */
export function watchStatus(authorize) {
  refresh(authorize);
  setInterval(() => document.hidden || refresh(authorize), EVERY_MS);
  document.addEventListener("visibilitychange", () => document.hidden || refresh(authorize));
}

async function refresh(authorize) {
  try {
    const models = await fetch("v1/models", { headers: authorize() });
    if (models.status === 401) return show("waiting", "an API key is needed: see Settings");
    showModel(await models.json());
    const isReady = (await fetch("ready")).ok;
    show(isReady ? "ready" : "waiting", isReady ? await countWorkers() : "not ready");
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

function showModel({ data: [first] }) {
  model = first.id;
  modelName.textContent = first.id;
  context.textContent = first.max_model_len ? `${first.max_model_len} tokens` : "";
}

async function getJson(path) {
  const response = await fetch(path);
  return response.json();
}
