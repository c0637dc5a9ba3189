"""The form of an output that calls functions, as a grammar: where it must call, where arguments must be right, and
where it may answer in a form of its own instead."""

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from core.errors import InvalidRequest
from gateway.text.chat import Function, Tools
from gateway.text.grammar import WHITESPACE, FormKind, OutputForm, own_rules
from gateway.text.tool_format import ToolFormat

_NAME = re.compile(r"</?\|?[\w.:-]+\|?>", re.ASCII)
"""A token in angle brackets that a rule can name."""


def tool_form(
    form: ToolFormat,
    tools: Tools,
    answer: OutputForm | None,
    added_tokens: Collection[str],
    markup_tokens: Sequence[str] = (),
) -> OutputForm | None:
    """None where the output needs no grammar. `answer` is what an output that calls nothing must look like;
    `added_tokens` are the texts that the vocabulary has as tokens of their own, besides those it is made of;
    `markup_tokens` are those of them that free text may have. Raises InvalidRequest."""
    if tools.is_required:
        return own_rules("tools", "\n".join(["start: calls", *_calls(form, tools, added_tokens)]))
    if answer is not None:
        return _calls_or(answer, _calls(form, tools, added_tokens))
    if form.closing and any(function.is_strict for function in _callable(tools)):
        text = _text_with_calls(form, added_tokens, markup_tokens)
        return own_rules("tools", "\n".join([*text, *_calls(form, tools, added_tokens)]))
    return None


def _calls_or(answer: OutputForm, calls: list[str]) -> OutputForm:
    if answer.kind is not FormKind.JSON_SCHEMA:
        message = f"{answer.field} cannot be told apart from calls of functions: set tool_choice to none or required"
        raise InvalidRequest(answer.field, message)
    schema = _bounded(json.loads(answer.text), is_strict=True)
    return own_rules(answer.field, "\n".join(["start: calls | answer", f"answer: %json {schema}", *calls]))


def _text_with_calls(
    form: ToolFormat, added_tokens: Collection[str], markup_tokens: Sequence[str]
) -> list[str]:
    """Any text, in which what opens a call is followed by one. Markup has to be named: to the library, a token in
    angle brackets is no text."""
    named = [token for token in markup_tokens if _NAME.fullmatch(token) and token not in form.markers]
    markup = [f"marked: TEXT ({' | '.join(named)})"] if named else []
    if form.opening in added_tokens:
        begun = f"begun: TEXT {form.opening}"
    else:
        begun = f"begun[lazy]: TEXT {json.dumps(form.opening)}"
    piece = "(begun rest | marked)" if named else "(begun rest)"
    return [f"start: {piece}* TEXT", r"TEXT: /(.|\n)*/", begun, *markup]


def _calls(form: ToolFormat, tools: Tools, added_tokens: Collection[str]) -> list[str]:
    """Rules: `calls`, and `rest`, which is a call after what opens it."""

    def marker(text: str) -> str:
        return text if text in added_tokens else json.dumps(text)

    functions = _callable(tools)
    space = json.dumps("\n")
    is_marked = bool(form.closing)
    joint = f" ({json.dumps(form.joint)} call)*" if tools.allows_several else ""
    return [
        f"calls: call{joint}",
        f"call: {marker(form.opening)} rest" if is_marked else "call: body",
        *([f"rest: {space} body {space} {marker(form.closing)}"] if is_marked else []),
        "body: " + " | ".join(f"f{at}" for at in range(len(functions))),
        *(rule for at, function in enumerate(functions) for rule in _function(form, at, function)),
    ]


def _function(form: ToolFormat, at: int, function: Function) -> list[str]:
    head = f'{{"name": {json.dumps(function.name)}, "{form.arguments_key}": '
    schema = _bounded({"type": "object", **(function.parameters or {})}, function.is_strict)
    if not function.parameters:
        schema = _bounded({"type": "object", "additionalProperties": False}, function.is_strict)
    return [f"f{at}: {json.dumps(head)} a{at} {json.dumps('}')}", f"a{at}: %json {schema}"]


def _bounded(schema: dict[str, Any], is_strict: bool) -> str:
    """What a grammar cannot say of a schema is left out unless it `is_strict`."""
    options = {"whitespace_pattern": WHITESPACE, "lenient": not is_strict}
    return json.dumps({**schema, "x-guidance": options})


def _callable(tools: Tools) -> list[Function]:
    return [function for function in tools.functions if function.name in tools.callable_names]
