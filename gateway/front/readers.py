"""What the bodies that clients send come to, by their kind. A reader may take long over a large body; what it makes
is plain enough to be sent between processes (gateway.front.body_parser)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gateway.ask import Ask, Prompt
from gateway.front.grpc_schema import read_message, to_ask
from gateway.front.openai_schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse_body
from gateway.front.responses_schema import UNSUPPORTED, ResponsesBody
from proto import client_pb2 as pb


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for, and how it is to be told. `echo` is what a response says of its request."""

    ask: Ask
    is_stream: bool = False
    wants_usage: bool = False
    wants_running_usage: bool = False
    is_resumable: bool = False
    echo: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tokenizing:
    model: str | None
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Detokenizing:
    model: str | None
    token_ids: tuple[int, ...]


class Reader(NamedTuple):
    """`read(raw, **options)` makes a `kind`. Raises InvalidRequest."""

    read: Callable[..., Any]
    kind: type


def _completion(raw: bytes, client_request_id: str) -> Asked:
    return _generation(parse_body(raw, CompletionBody), client_request_id)


def _chat(raw: bytes, client_request_id: str) -> Asked:
    return _generation(parse_body(raw, ChatBody), client_request_id)


def _generation(body: CompletionBody | ChatBody, client_request_id: str) -> Asked:
    ask = body.ask(client_request_id)
    return Asked(ask, bool(body.stream), body.wants_usage, body.wants_running_usage)


def _response(raw: bytes, client_request_id: str) -> Asked:
    body: ResponsesBody = parse_body(raw, ResponsesBody, UNSUPPORTED)
    return Asked(body.ask(client_request_id), bool(body.stream), echo=body.echo())


def _tokenizing(raw: bytes) -> Tokenizing:
    body: TokenizeBody = parse_body(raw, TokenizeBody)
    return Tokenizing(body.model, body.to_prompt())


def _detokenizing(raw: bytes) -> Detokenizing:
    body: DetokenizeBody = parse_body(raw, DetokenizeBody)
    return Detokenizing(body.model, tuple(body.tokens))


def _generate(raw: bytes, model_id: str, is_stream: bool) -> Asked:
    """A serialised GenerateRequest; `model_id` is what an empty model means."""
    request = read_message(pb.GenerateRequest, raw)
    return Asked(to_ask(request, model_id, is_stream), is_stream, is_resumable=request.resumable)


READERS = {
    "completion": Reader(_completion, Asked),
    "chat": Reader(_chat, Asked),
    "response": Reader(_response, Asked),
    "tokenize": Reader(_tokenizing, Tokenizing),
    "detokenize": Reader(_detokenizing, Detokenizing),
    "generate": Reader(_generate, Asked),
}
