"""A model's chat template: Jinja in a sandbox, with what Hugging Face's templates may call. Knows no tokens.

Text that clients wrote is plain data to it: their strings are values of variables and never compiled.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from core.errors import InvalidRequest, ModelLoadError
from gateway.text.chat import Chat, Message
from gateway.text.tool_format import HERMES, told_format
from gateway.text.tool_prompt import spelled_out

Json = dict[str, Any]
FIXED_VALUES = (
    "add_generation_prompt",
    "bos_token",
    "chat_template",
    "continue_final_message",
    "documents",
    "eos_token",
    "messages",
    "tools",
)
"""Variables that a client cannot set by `chat_template_kwargs`, besides what templates may call."""
_MISTAKES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template raises over messages that it does not expect."""


class ChatTemplate:
    """Immutable; render() may run in any thread. Raises ModelLoadError for a source that is no template."""

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"the model's chat template is not understood: {error}") from error
        told = told_format(source) if "tools" in variables else None
        self.tool_format = told or HERMES
        self._takes_tools = told is not None
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self.fixed_values = frozenset((*FIXED_VALUES, *environment.globals))

    def render(
        self,
        messages: Sequence[Json],
        tools: Sequence[Json],
        opens_answer: bool,
        values: Mapping[str, Any],
    ) -> str:
        """The prompt's text. A template that knows of no tools, or has a form for their calls that nothing here can
        read, gets them spelled out. Raises InvalidRequest when the template refuses the messages."""
        try:
            if not self._takes_tools:
                messages, tools = spelled_out(messages, tools), ()
            return self._template.render(
                **values,
                **self._tokens,
                messages=messages,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=opens_answer,
            )
        except _MISTAKES as error:
            raise InvalidRequest("messages", f"the model's chat template refused them: {error}") from error


def template_messages(chat: Chat) -> list[Json]:
    """As Hugging Face's templates take them: a call's arguments are an object, if they are JSON; a result has the
    function's name, which some want; content that is missing is empty, since some look into it."""
    names = {call.call_id: call.name for message in chat.messages for call in message.calls}
    return [_template_message(message, names) for message in chat.messages]


def template_tools(chat: Chat) -> list[Json]:
    functions = chat.tools.functions if chat.tools is not None else ()
    return [
        {
            "type": "function",
            "function": {
                "name": function.name,
                "description": function.description,
                "parameters": dict(function.parameters or {"type": "object", "properties": {}}),
            },
        }
        for function in functions
    ]


def _template_message(message: Message, names: Mapping[str, str]) -> Json:
    """`names` are those of functions by the ids of their calls."""
    own: Json = {"role": message.role, "content": message.content or ""}
    if name := message.name or names.get(message.call_id, ""):
        own["name"] = name
    if message.reasoning:
        own["reasoning_content"] = message.reasoning
    if message.call_id:
        own["tool_call_id"] = message.call_id
    if message.calls:
        own["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in message.calls
        ]
    return own


def _arguments(text: str) -> Any:
    try:
        arguments = json.loads(text or "{}")
        json.dumps(
            arguments, ensure_ascii=False
        ).encode()  # half a surrogate pair, escaped, is JSON and no text
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text


class _Generation(Extension):
    """`{% generation %}` surrounds what an assistant says, for who trains on it; here it is its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    environment.filters["tojson"] = _to_json
    return environment


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes what HTML would take for markup."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
