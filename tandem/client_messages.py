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
class Sampling:
    """How to generate. What is None is left to the server; names and meanings are those of GenerateRequest."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Text that follows that of the chunk before, and the tokens since then. The last chunk, and no other, has a
    finish reason ("stop" or "length"), usage and timing."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str = ""
    usage: Usage | None = None
    timing: Timing | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timing: Timing


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
    if not message.finish_reason:
        return Chunk(message.request_id, message.text, tuple(message.token_ids))
    return Chunk(
        message.request_id,
        message.text,
        tuple(message.token_ids),
        convert.finish_name(message.finish_reason),
        _usage(message.usage),
        _timing(message.timing),
    )


def to_answer(chunks: Iterable[Chunk]) -> Answer:
    """The chunks of a whole stream, put together."""
    parts = list(chunks)
    last = parts[-1]
    assert last.usage is not None and last.timing is not None, "a stream ends with its last chunk or an error"
    text = "".join(part.text for part in parts)
    token_ids = tuple(token_id for part in parts for token_id in part.token_ids)
    return Answer(last.request_id, text, token_ids, last.finish_reason, last.usage, last.timing)


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
