// The settings form as fields of a request. An empty field is not sent, so that the server's default holds.

const ESCAPES = { "\\n": "\n", "\\t": "\t", "\\\\": "\\" };

export function readSettings(form) {
  const fields = {};
  for (const input of form.querySelectorAll("input[type=number]")) {
    if (input.value !== "") fields[input.name] = input.valueAsNumber;
  }
  const stop = form.elements.stop.value.split("\n").filter(Boolean).map(unescape);
  if (stop.length) fields.stop = stop;
  return fields;
}

/** The headers that the key in the form asks for. */
export function authorization(form) {
  const key = form.elements.api_key.value.trim();
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** The conversation so far as the server wants it. */
export function withSystemPrompt(form, messages) {
  const content = form.elements.system.value;
  return content.trim() ? [{ role: "system", content }, ...messages] : messages;
}

function unescape(line) {
  return line.replace(/\\[nt\\]/g, (escape) => ESCAPES[escape]);
}
