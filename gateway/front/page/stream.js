// A streaming chat request and its events. Knows nothing of the page.

/** What the server, or the way to it, has to say instead of an answer. `field` names the parameter at fault, or is empty. */
export class RequestError extends Error {
  constructor(code, message, field = "") {
    super(message);
    this.code = code;
    this.field = field;
  }
}

/** The events of a chat completion as objects, until the server says that it is done. Throws RequestError for whatever
 * ends it otherwise, and what fetch throws when `signal` aborts it. `authorization` are more headers. */
export async function* streamChat(request, signal, authorization = {}) {
  const response = await post("v1/chat/completions", request, signal, authorization);
  for await (const data of readEvents(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw toError(event.error);
    yield event;
  }
  throw new RequestError("connection_lost", "the stream ended before the answer did");
}

/** The data of each server-sent event of a stream of bytes, which may be cut anywhere, within a character too. */
export async function* readEvents(body) {
  const decoder = new TextDecoder();
  let pending = "";
  let data = [];
  for await (const bytes of chunksOf(body)) {
    const lines = (pending + decoder.decode(bytes, { stream: true })).split("\n");
    pending = lines.pop();
    for (const line of lines.map((text) => text.replace(/\r$/, ""))) {
      if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      if (line === "" && data.length) {
        yield data.join("\n");
        data = [];
      }
    }
  }
}

/** Not every browser can iterate a stream by itself. */
async function* chunksOf(body) {
  const reader = body.getReader();
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
  } finally {
    reader.cancel().catch(() => {}); // what ended the reading is told already
  }
}

async function post(path, request, signal, authorization) {
  const headers = { "content-type": "application/json", "x-tandem-timing": "1", ...authorization };
  const body = JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } });
  const response = await fetch(path, { method: "POST", headers, body, signal });
  if (!response.ok) throw toError(await errorOf(response));
  return response;
}

/** The error object of an answer, or the status where a proxy on the way answered with something else. */
async function errorOf(response) {
  try {
    return (await response.json()).error;
  } catch {
    return { code: `status ${response.status}`, message: response.statusText };
  }
}

function toError(error) {
  return new RequestError(error.code, error.message, error.param ?? "");
}
