"""Functions, calls and results as plain messages, in Hermes' form, for models whose template knows of none of them.
Messages are dictionaries as templates take them."""

import json
from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]
_INTRODUCTION = """# Tools

You may call one or more functions to help the user. Their signatures, as JSON, one a line:
<tools>
{functions}
</tools>

For each call write a JSON object with the function's name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": <function name>, "arguments": <object of arguments>}}
</tool_call>"""


def spelled_out(messages: Sequence[Json], tools: Sequence[Json]) -> list[Json]:
    """The same chat in messages that have a role and a content and nothing else. The functions go to the end of the
    system message, which the chat gets if it begins with none."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    system = _INTRODUCTION.format(functions="\n".join(map(_json, tools)))
    if plain and plain[0]["role"] == "system":
        said = plain.pop(0)["content"]
        system = f"{said}\n\n{system}" if said else system
    return [{"role": "system", "content": system}, *plain]


def _plain(message: Json) -> Json:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [_call(call["function"]) for call in message.get("tool_calls", ())]
    said = [message["content"]] if message["content"] else []
    return {"role": message["role"], "content": "\n".join(said + calls)}


def _call(function: Json) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{_json(call)}\n</tool_call>"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
