"""The bodies that OpenAI clients send, with every field's type and range. Unknown fields are ignored, as OpenAI does;
known ones that are not supported yet are refused by name unless they ask for what happens anyway."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import from_json

from core.errors import InvalidRequest
from gateway.serving import MAX_STOP_LEN, MAX_STOP_STRINGS, Ask, Prompt

MAX_TOKENS = 2**31 - 1
MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_PROMPT_IDS = 1 << 20
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LEN)]

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0, 0.0),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "min_p": (None, 0, 0.0),
    "min_tokens": (None, 0),
    "n": (None, 1),
    "presence_penalty": (None, 0, 0.0),
    "prompt_logprobs": (None,),
    "repetition_penalty": (None, 1, 1.0),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tools": (None, []),
    "top_logprobs": (None, 0),
}


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StreamOptions(_Body):
    include_usage: bool | None = None


class _Common(_Body):
    model: Annotated[str, Field(max_length=512)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def to_ask(self, prompt: Prompt, max_tokens: int | None, client_request_id: str) -> Ask:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "stream_options needs stream to be true")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return Ask(
            model=self.model,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            seed=self.seed,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            client_request_id=client_request_id,
        )


class CompletionBody(_Common):
    """POST /v1/completions. One prompt a request: text, a list of token ids, or a list holding just one of them."""

    prompt: str | Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_PROMPT_IDS)]

    @field_validator("prompt", mode="before")
    @classmethod
    def _only_prompt(cls, prompt: Any) -> Any:
        """Unwrap a list of one prompt. Looks at the outermost shape only, so that no list is too long to refuse."""
        if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], str | list):
            return prompt
        if len(prompt) > 1:
            raise ValueError("one prompt per request is supported")
        return prompt[0]

    def ask(self, client_request_id: str) -> Ask:
        text = self.prompt if isinstance(self.prompt, str) else None
        token_ids = None if isinstance(self.prompt, str) else tuple(self.prompt)
        return self.to_ask(
            Prompt("prompt", text=text, token_ids=token_ids), self.max_tokens, client_request_id
        )


class TextPart(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS)]

    def plain(self) -> dict[str, str]:
        """As templates want it; `developer` is OpenAI's newer name of `system`."""
        content = (
            self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        )
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatBody(_Common):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None

    def ask(self, client_request_id: str) -> Ask:
        """`max_completion_tokens` is the newer name of `max_tokens` and wins when both are given."""
        messages = tuple(message.plain() for message in self.messages)
        max_tokens = self.max_completion_tokens or self.max_tokens
        return self.to_ask(Prompt("messages", messages=messages), max_tokens, client_request_id)


class TokenizeBody(_Body):
    """POST /v1/tokenize: `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: (
        Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] | None
    ) = None

    def to_prompt(self) -> Prompt:
        if self.messages is not None:
            return Prompt("messages", messages=tuple(message.plain() for message in self.messages))
        if self.prompt is None:
            raise InvalidRequest("prompt", "either prompt or messages is needed")
        return Prompt("prompt", text=self.prompt)


def parse_body(raw: bytes, kind: type[_Body]) -> Any:
    """The body as `kind`. Raises InvalidRequest naming the first field at fault."""
    try:
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest("body", f"the body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidRequest("body", "the body is not a JSON object")
    _refuse_unsupported(data)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = str(first["loc"][0]) if first["loc"] else "body"
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(field, f"{where}: {first['msg']}") from error


def _refuse_unsupported(data: dict[str, Any]) -> None:
    for name, harmless in _UNSUPPORTED.items():
        if name in data and not any(_is_same(data[name], value) for value in harmless):
            raise InvalidRequest(name, f"{name} is not supported yet")


def _is_same(given: Any, harmless: Any) -> bool:
    """Equal, and no boolean taken for a number."""
    return bool(given == harmless) and isinstance(given, bool) == isinstance(harmless, bool)
