"""POST /v1/responses, as far as it can be had without anything being stored: the body, with every field's type and
range. Knows nothing of what is answered."""

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, field_validator

from gateway.ask import Ask, Prompt
from gateway.front.message_fields import (
    MAX_MESSAGES,
    FunctionFields,
    FunctionName,
    ShortText,
    ToolMode,
    choose_tools,
    joined_text,
)
from gateway.front.sampling_fields import MAX_TOKENS, Body, SamplingFields
from gateway.text.chat import MAX_FUNCTIONS, Chat, Function, Message, ToolCall, Tools
from gateway.text.grammar import OutputForm, check_size, json_object, json_schema

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "chat_template": (None,),
    "context_management": (None, []),
    "conversation": (None,),
    "moderation": (None,),
    "previous_response_id": (None,),
    "prompt": (None,),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
}
"""Refused by name unless it asks for what happens anyway."""
IGNORED_INCLUDES = ("reasoning.encrypted_content",)


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, content: Any) -> str:
        return joined_text(content)

    def add_to(self, messages: list[Message]) -> None:
        messages.append(Message("system" if self.role == "developer" else self.role, self.content))


class FunctionCallItem(Body):
    type: Literal["function_call"]
    call_id: ShortText
    name: ShortText
    arguments: str

    def add_to(self, messages: list[Message]) -> None:
        """To the assistant's message before it, if there is one: a turn is one message."""
        call = ToolCall(self.call_id, self.name, self.arguments)
        last = messages.pop() if messages and messages[-1].role == "assistant" else Message("assistant", None)
        messages.append(Message("assistant", last.content, calls=(*last.calls, call)))


class FunctionCallOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: ShortText
    output: str

    @field_validator("output", mode="before")
    @classmethod
    def _joined(cls, output: Any) -> str:
        return joined_text(output)

    def add_to(self, messages: list[Message]) -> None:
        messages.append(Message("tool", self.output, call_id=self.call_id))


class ReasoningItem(Body):
    """What a model thought, as such clients send it back; not shown to it again."""

    type: Literal["reasoning"]

    def add_to(self, messages: list[Message]) -> None:
        pass


Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
_ITEMS: dict[Any, TypeAdapter[Item]] = {
    "message": TypeAdapter(MessageItem),
    "function_call": TypeAdapter(FunctionCallItem),
    "function_call_output": TypeAdapter(FunctionCallOutputItem),
    "reasoning": TypeAdapter(ReasoningItem),
}


class FunctionTool(FunctionFields):
    """Unlike in a chat, its fields are the tool's own."""

    type: Literal["function"]


class NamedFunctionTool(Body):
    type: Literal["function"]
    name: FunctionName


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFields(Body):
    format: TextFormat | None = None


class ResponsesBody(SamplingFields):
    """None stands for the default. What is stored is nothing, whatever `store` says."""

    model: Annotated[str, Field(max_length=512)]
    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_FUNCTIONS)] | None = None
    tool_choice: ToolMode | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextFields | None = None
    metadata: Annotated[dict[str, ShortText], Field(max_length=16)] | None = None
    include: list[str] | None = None
    stream: bool | None = None
    store: bool | None = None
    n: Literal[1] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("input", mode="plain")
    @classmethod
    def _items(cls, value: Any) -> Any:
        if isinstance(value, str):
            return value
        if not isinstance(value, list) or not value:
            raise ValueError("input is a text or a list of at least one item")
        if len(value) > MAX_MESSAGES:
            raise ValueError(f"at most {MAX_MESSAGES} items")
        return [_item(at, item) for at, item in enumerate(value)]

    @field_validator("include")
    @classmethod
    def _check_include(cls, include: list[str] | None) -> list[str] | None:
        other = next((name for name in include or () if name not in IGNORED_INCLUDES), None)
        if other is not None:
            raise ValueError(f"{other[:64]!r} cannot be included")
        return include

    def ask(self, client_request_id: str) -> Ask:
        """Raises InvalidRequest."""
        return self.to_ask(
            self.model,
            (Prompt("input", chat=self._chat()),),
            max_tokens=self.max_output_tokens,
            is_stream=bool(self.stream),
            client_request_id=client_request_id,
        )

    def echo(self) -> dict[str, Any]:
        """What a response says of its request."""
        form = self.text.format if self.text is not None else None
        choice = self.tool_choice or "auto"
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {
                "format": {"type": "text"}
                if form is None
                else form.model_dump(by_alias=True, exclude_none=True)
            },
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in self.tools or ()],
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": "disabled",
        }

    def _chat(self) -> Chat:
        messages = [] if self.instructions is None else [Message("system", self.instructions)]
        if isinstance(self.input, str):
            messages.append(Message("user", self.input))
        else:
            for item in self.input:
                item.add_to(messages)
        tools = self._tools()
        check_size(
            "tools", [function.parameters for function in tools.functions] if tools is not None else []
        )
        check_size("chat_template_kwargs", self.chat_template_kwargs)
        return Chat(tuple(messages), tools, template_values=self.chat_template_kwargs or {})

    def _tools(self) -> Tools | None:
        functions: list[Function] = [tool.to_function() for tool in self.tools or ()]
        choice, is_parallel = self.tool_choice, self.parallel_tool_calls
        if isinstance(choice, NamedFunctionTool):
            return choose_tools(functions, None, choice.name, is_parallel)
        return choose_tools(functions, choice, None, is_parallel)

    def _forms(self) -> list[OutputForm | None]:
        return [self._text_form(), *super()._forms()]

    def _text_form(self) -> OutputForm | None:
        form = self.text.format if self.text is not None else None
        match form.type if form is not None else "text":
            case "json_object":
                return json_object("text")
            case "json_schema":
                return json_schema("text", form.json_schema if form is not None else None)
        return None


def _item(at: int, item: Any) -> Item:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise ValueError(f"item {at} is of type {str(kind)[:64]!r}, which this server does not read")
    return _ITEMS[kind].validate_python(item, strict=True)
