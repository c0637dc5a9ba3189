"""What the Python client takes and gives, and how that is said in `tandem.v1`. Knows nothing of calls."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import grpc

from core.errors import (
    Busy,
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    TandemError,
    Unavailable,
    error_from,
)
from core.sampling import Top
from gateway.timing import Timing
from proto import client_pb2 as pb
from proto import convert


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat; `role` is system, user or assistant."""

    role: str
    content: str


_BY_STATUS: dict[grpc.StatusCode, type[TandemError]] = {
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
}
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """What an output must look like, exactly one of: a JSON value of a schema (its text), a match of a regular
    expression, one of some texts, a text of a grammar (Lark or EBNF), any JSON object."""

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to generate. What is None is left to the server; names and meanings are those of GenerateRequest."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    n: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    structured_outputs: StructuredOutputs | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's log-probability under the model (None: a prompt's first token has none), its rank among all (a
    prompt's tokens only), and the likeliest tokens in its place."""

    token_id: int
    logprob: float | None
    rank: int
    top: Top


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is new of one choice: text that follows that of its chunk before, and the tokens since then. A choice's
    last chunk, and no other, has a finish reason ("stop" or "length"), its timing, and the stop string or token that
    ended it, if one did that the request names; the answer's last chunk has the usage. Probabilities are there if the
    request asks for them, the prompt's before the choice's first token."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str = ""
    usage: Usage | None = None
    timing: Timing | None = None
    choice: int = 0
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """A whole output."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None
    timing: Timing
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer: as many choices as were asked for. What is said without naming one is of the first."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    @property
    def timing(self) -> Timing:
        return self.choices[0].timing


@dataclass(frozen=True, slots=True)
class Model:
    """What is served. `context_len` is the longest prompt plus output, in tokens."""

    model: str
    fingerprint: str
    context_len: int
    vocab_size: int


def make_request(prompt: Prompt, sampling: Sampling, client_request_id: str) -> pb.GenerateRequest:
    """A resumable request. Raises InvalidRequest for a value that its field cannot hold."""
    request = pb.GenerateRequest(client_request_id=client_request_id, resumable=True)
    given = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
    for name, value in (*given.items(), _prompt(prompt)):
        if value is None:
            continue
        if isinstance(value, StructuredOutputs):
            value = {key: part for key, part in asdict(value).items() if part is not None}
        try:
            request.MergeFrom(pb.GenerateRequest(**{name: value}))
        except (TypeError, ValueError) as error:
            raise InvalidRequest(name, f"{name}: {error}") from error
    return request


def _prompt(prompt: Prompt) -> tuple[str, Any]:
    """The field that it goes into, and what goes there."""
    if isinstance(prompt, str):
        return "text", prompt
    messages = [part for part in prompt if isinstance(part, Message)]
    if messages and len(messages) == len(prompt):
        return "chat", {"messages": [asdict(message) for message in messages]}
    return "token_ids", {"ids": prompt}


def to_chunk(message: pb.GenerateChunk) -> Chunk:
    choice = message.choice
    is_last = bool(choice.finish_reason)
    return Chunk(
        message.request_id,
        choice.text,
        tuple(choice.token_ids),
        convert.finish_name(choice.finish_reason),
        _usage(message.usage) if message.HasField("usage") else None,
        _timing(choice.timing) if is_last else None,
        choice.index,
        choice.stop_token_id if choice.HasField("stop_token_id") else choice.stop_string or None,
        tuple(map(_token, choice.logprobs)),
        tuple(map(_token, choice.prompt_logprobs)),
    )


def _token(token: pb.TokenLogprob) -> TokenLogprob:
    logprob = token.logprob if token.HasField("logprob") else None
    return TokenLogprob(token.token_id, logprob, token.rank, convert.top_from_proto(token.top))


def to_answer(chunks: Iterable[Chunk]) -> Answer:
    """The chunks of a whole stream, put together."""
    by_choice: dict[int, list[Chunk]] = {}
    chunk: Chunk | None = None
    for chunk in chunks:
        by_choice.setdefault(chunk.choice, []).append(chunk)
    assert chunk is not None and chunk.usage is not None, "a stream ends with its last chunk or an error"
    choices = tuple(_whole(by_choice[choice]) for choice in sorted(by_choice))
    return Answer(chunk.request_id, choices, chunk.usage)


def _whole(chunks: Sequence[Chunk]) -> Choice:
    last = chunks[-1]
    assert last.timing is not None, "a choice ends with its last chunk"
    return Choice(
        "".join(chunk.text for chunk in chunks),
        tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        last.finish_reason,
        last.stop_reason,
        last.timing,
        tuple(token for chunk in chunks for token in chunk.logprobs),
        tuple(token for chunk in chunks for token in chunk.prompt_logprobs),
    )


def to_model(message: pb.GetModelResponse) -> Model:
    return Model(message.model, message.fingerprint, message.context_len, message.vocab_size)


def _usage(message: pb.Usage) -> Usage:
    return Usage(message.num_prompt_tokens, message.num_completion_tokens, message.num_cached_tokens)


def _timing(message: pb.Timing) -> Timing:
    values = {field.name: getattr(message, field.name) for field in fields(Timing)}
    return Timing(**{**values, "causes": tuple(message.causes)})


def to_error(error: grpc.RpcError) -> TandemError:
    """What a failed call stands for: the gateway's typed error, or what befell the call on its way."""
    told = _metadata(error)
    details = error.details() or error.code().name
    if "tandem-code" not in told:
        return _BY_STATUS.get(error.code(), EngineFailed)(f"{error.code().name}: {details}")
    field = told.get("tandem-field", "")
    made = error_from(told["tandem-code"], details.removeprefix(f"{field}: "), field)
    if isinstance(made, Busy):
        made.retry_after_s = float(told.get("tandem-retry-after-s", made.retry_after_s))
    return made


def is_broken_connection(error: grpc.RpcError) -> bool:
    """No answer of the gateway, which names its error."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and "tandem-code" not in _metadata(error)


def _metadata(error: grpc.RpcError) -> dict[str, str]:
    return {key: value for key, value in error.trailing_metadata() or ()}
