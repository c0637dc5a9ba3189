"""Messages and tools as OpenAI's clients write them, with every field's type and range, as the core wants them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from core.errors import InvalidRequest
from gateway.front.sampling_fields import Body
from gateway.text.chat import FUNCTION_NAME, MAX_FUNCTIONS, Chat, Function, Message, ToolCall, Tools
from gateway.text.grammar import check_size

MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_CALLS = 1024
TEXT_PARTS = ("text", "input_text", "output_text")
ShortText = Annotated[str, Field(max_length=512)]
FunctionName = Annotated[str, Field(pattern=FUNCTION_NAME)]


def joined_text(content: Any) -> str:
    """Content as text or as parts of text. Raises ValueError: nothing else is read, and nothing is ever fetched."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("content is a text or a list of parts")
    if len(content) > MAX_PARTS:
        raise ValueError(f"at most {MAX_PARTS} parts")
    return "".join(_part_text(at, part) for at, part in enumerate(content))


def _part_text(at: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in TEXT_PARTS:
        raise ValueError(f"part {at} is of type {str(kind)[:64]!r}: this server reads text only")
    text = part.get("text")
    if not isinstance(text, str):
        raise ValueError(f"part {at} has no text")
    return text


class CalledFunctionFields(Body):
    name: ShortText
    arguments: str


class ToolCallFields(Body):
    id: ShortText
    type: Literal["function"] = "function"
    function: CalledFunctionFields

    def call(self) -> ToolCall:
        return ToolCall(self.id, self.function.name, self.function.arguments)


class MessageFields(Body):
    """`developer` is OpenAI's newer name of `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    name: ShortText | None = None
    tool_calls: Annotated[list[ToolCallFields], Field(fail_fast=True, max_length=MAX_CALLS)] | None = None
    tool_call_id: ShortText | None = None
    reasoning_content: str | None = None
    function_call: None = None
    audio: None = None

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, content: Any) -> Any:
        return None if content is None else joined_text(content)

    @model_validator(mode="after")
    def _check_role(self) -> "MessageFields":
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are an assistant's")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a tool's message needs tool_call_id")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing")
        return self

    def message(self) -> Message:
        return Message(
            "system" if self.role == "developer" else self.role,
            self.content,
            self.name or "",
            tuple(call.call() for call in self.tool_calls or ()),
            self.tool_call_id or "",
            self.reasoning_content or "",
        )


MessageList = Annotated[list[MessageFields], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


class FunctionFields(Body):
    """`parameters` is a JSON schema whose values are objects, as arguments are."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _check_parameters(cls, parameters: dict[str, Any] | None) -> dict[str, Any] | None:
        if parameters and parameters.get("type", "object") != "object":
            raise ValueError("the schema of a function's arguments is one of an object")
        return parameters

    def to_function(self) -> Function:
        return Function(self.name, self.description or "", self.parameters, bool(self.strict))


class ToolFields(Body):
    type: Literal["function"]
    function: FunctionFields


ToolList = Annotated[list[ToolFields], Field(fail_fast=True, max_length=MAX_FUNCTIONS)]


class NamedFunction(Body):
    name: FunctionName


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatFields(Body):
    """What a chat's prompt is made of: of a request, and of what is only tokenised."""

    tools: ToolList | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def to_chat(self, messages: Sequence[MessageFields], tools: Tools | None) -> Chat:
        """Raises InvalidRequest."""
        continues = bool(self.continue_final_message)
        if continues and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message",
                "add_generation_prompt and continue_final_message exclude each other",
            )
        check_size(
            "tools", [function.parameters for function in tools.functions] if tools is not None else []
        )
        check_size("chat_template_kwargs", self.chat_template_kwargs)
        last = messages[-1]
        if continues and (last.content is None or last.tool_calls):
            raise InvalidRequest("continue_final_message", "the last message has no text to be continued")
        return Chat(
            tuple(message.message() for message in messages),
            tools,
            self.add_generation_prompt is not False,
            continues,
            self.chat_template_kwargs or {},
        )

    def functions(self) -> list[Function]:
        return [tool.function.to_function() for tool in self.tools or ()]


ToolMode = Literal["none", "auto", "required"]


def choose_tools(
    functions: Sequence[Function], mode: ToolMode | None, named: str | None, is_parallel: bool | None
) -> Tools | None:
    """What an answer may call. `named` is the function that it must call, if tool_choice is one. None when it calls
    nothing: then the prompt does not show the functions either. Raises InvalidRequest."""
    names = [function.name for function in functions]
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if twice is not None:
        raise InvalidRequest("tools", f"there are two functions named {twice}")
    if not functions and (named is not None or mode == "required"):
        raise InvalidRequest("tool_choice", "tool_choice needs tools")
    if named is not None and named not in names:
        raise InvalidRequest("tool_choice", f"tools has no function named {named}")
    if not functions or mode == "none":
        return None
    return Tools(
        tuple(functions),
        frozenset(names if named is None else [named]),
        mode == "required" or named is not None,
        is_parallel is not False and named is None,
    )
