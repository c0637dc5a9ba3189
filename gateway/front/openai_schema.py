"""The bodies that OpenAI clients send, with every field's type and range. Unknown fields are ignored, as OpenAI does;
known ones that are not supported yet are refused by name unless they ask for what happens anyway."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError, field_validator
from pydantic_core import from_json

from core.errors import InvalidRequest
from gateway.ask import MAX_CHOICES, Ask, Prompt
from gateway.front.message_fields import ChatFields, MessageList, NamedTool, ToolMode, choose_tools
from gateway.front.sampling_fields import MAX_TOKENS, Body, NumLogprobs, SamplingFields, TokenId, validated
from gateway.text.chat import Tools

MAX_PROMPT_IDS = 1 << 20

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "chat_template": (None,),
    "documents": (None, []),
    "function_call": (None, "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "web_search_options": (None,),
}


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Common(SamplingFields):
    model: Annotated[str, Field(max_length=512)]
    prompt_logprobs: NumLogprobs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def _check_stream(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "stream_options needs stream to be true")


class CompletionBody(_Common):
    """POST /v1/completions. Prompts: a text, token ids, or a list of several of either."""

    prompt: tuple[Prompt, ...]
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None

    @field_validator("prompt", mode="plain")
    @classmethod
    def _prompts(cls, prompt: Any) -> tuple[Prompt, ...]:
        """The outermost shape decides how the rest is read, so that no list is too long to refuse."""
        if isinstance(prompt, str):
            return (Prompt("prompt", text=prompt),)
        if not isinstance(prompt, list):
            raise ValueError("a prompt is a string, a list of token ids, or a list of several of either")
        if not prompt or isinstance(prompt[0], int):
            return (Prompt("prompt", token_ids=tuple(_checked(_IDS, prompt))),)
        if len(prompt) > MAX_CHOICES:
            raise ValueError(f"at most {MAX_CHOICES} prompts")
        if isinstance(prompt[0], str):
            return tuple(Prompt("prompt", text=text) for text in _checked(_TEXTS, prompt))
        return tuple(Prompt("prompt", token_ids=tuple(ids)) for ids in _checked(_ID_LISTS, prompt))

    def ask(self, client_request_id: str) -> Ask:
        self._check_stream()
        return self.to_ask(
            self.model,
            self.prompt,
            best_of=self.best_of,
            num_logprobs=self.logprobs,
            num_prompt_logprobs=self.prompt_logprobs,
            echoes=bool(self.echo),
            is_stream=bool(self.stream),
            client_request_id=client_request_id,
        )


class ChatBody(_Common, ChatFields):
    """POST /v1/chat/completions."""

    messages: MessageList
    tool_choice: ToolMode | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None

    def ask(self, client_request_id: str) -> Ask:
        """`max_completion_tokens` is the newer name of `max_tokens` and wins when both are given."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs", "top_logprobs needs logprobs to be true")
        self._check_stream()
        return self.to_ask(
            self.model,
            (Prompt("messages", chat=self.to_chat(self.messages, self._tools())),),
            max_tokens=self.max_completion_tokens,
            num_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            num_prompt_logprobs=self.prompt_logprobs,
            is_stream=bool(self.stream),
            client_request_id=client_request_id,
        )

    def _tools(self) -> Tools | None:
        choice, is_parallel = self.tool_choice, self.parallel_tool_calls
        if isinstance(choice, NamedTool):
            return choose_tools(self.functions(), None, choice.function.name, is_parallel)
        return choose_tools(self.functions(), choice, None, is_parallel)


class TokenizeBody(ChatFields):
    """POST /v1/tokenize: `prompt`, or `messages` with what else makes a chat's prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: MessageList | None = None

    def to_prompt(self) -> Prompt:
        if self.messages is not None:
            tools = choose_tools(self.functions(), "auto", None, None)
            return Prompt("messages", chat=self.to_chat(self.messages, tools))
        if self.prompt is None:
            raise InvalidRequest("prompt", "either prompt or messages is needed")
        return Prompt("prompt", text=self.prompt)


class DetokenizeBody(Body):
    """POST /v1/detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_PROMPT_IDS)]


def parse_body(
    raw: bytes, kind: type[Body], unsupported: Mapping[str, tuple[Any, ...]] = _UNSUPPORTED
) -> Any:
    """The body as `kind`; fields of `unsupported` may have the values that it lists. Raises InvalidRequest naming the
    first field at fault."""
    try:
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest("body", f"the body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidRequest("body", "the body is not a JSON object")
    _refuse(data, unsupported)
    return validated(kind, data)


def _refuse(data: dict[str, Any], unsupported: Mapping[str, tuple[Any, ...]]) -> None:
    for name, harmless in unsupported.items():
        if name in data and not any(_is_same(data[name], value) for value in harmless):
            raise InvalidRequest(name, f"{name} is not supported yet")


def _is_same(given: Any, harmless: Any) -> bool:
    """Equal, and no boolean taken for a number."""
    return bool(given == harmless) and isinstance(given, bool) == isinstance(harmless, bool)


_IDS = TypeAdapter(Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_PROMPT_IDS)])
_TEXTS = TypeAdapter(Annotated[list[str], Field(fail_fast=True)])
_ID_LISTS = TypeAdapter(
    Annotated[
        list[Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_PROMPT_IDS)]],
        Field(fail_fast=True),
    ]
)


def _checked(adapter: TypeAdapter[Any], value: Any) -> Any:
    try:
        return adapter.validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: {first['msg']}") from None
