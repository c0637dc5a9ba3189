"""Streamed answers as server-sent events. Closing a stream aborts what is left of its request, also when its task is
being cancelled."""

from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from typing import Any, NamedTuple

from core.errors import TandemError
from gateway.front.json_text import compact_json, large_json
from gateway.front.openai_objects import Envelope, error_object
from gateway.front.rendering import MAX_INLINE, num_logprobs, rendered
from gateway.front.responses_objects import ResponseWriter
from gateway.text_generation import TextChunk


class StreamWishes(NamedTuple):
    """What a stream tells beside its text: usage at the end, usage all the time, timing with each choice's end."""

    usage: bool
    running_usage: bool
    timing: bool


async def choice_events(
    first: TextChunk,
    rest: AsyncGenerator[TextChunk, None],
    num_choices: int,
    envelope: Envelope,
    wishes: StreamWishes,
) -> AsyncIterator[bytes]:
    """Completions and chats. An error after the headers is an error event and the end, never a finish."""
    try:
        for choice in range(num_choices):
            if (opening := envelope.shape.opening(choice)) is not None:
                yield _event(envelope.chunk(opening, _usage(envelope, wishes)))
        async for chunk in _with_first(first, rest):
            timing = envelope.timing(chunk.choice) if chunk.finish_reason and wishes.timing else None
            make = partial(_chunk_events, chunk, envelope, wishes, timing)
            for event in await rendered(make, [chunk]):
                yield event
        if wishes.usage:
            yield _event(envelope.chunk(None, envelope.usage()))
        yield b"data: [DONE]\n\n"
    except TandemError as error:
        yield _event(error_object(error))
    finally:
        await rest.aclose()


def _usage(envelope: Envelope, wishes: StreamWishes) -> dict[str, Any]:
    """What each chunk but the last says of it."""
    if wishes.running_usage:
        return envelope.usage()
    return {"usage": None} if wishes.usage else {}


def _chunk_events(
    chunk: TextChunk, envelope: Envelope, wishes: StreamWishes, timing: dict[str, Any] | None
) -> list[bytes]:
    """`timing` goes with the choice's end."""
    parts = [
        (choice, envelope.chunk(choice, _usage(envelope, wishes))) for choice in envelope.shape.parts(chunk)
    ]
    for choice, part in parts:
        if choice["finish_reason"] and timing is not None:
            part["timing"] = timing
    is_large = num_logprobs([chunk]) > MAX_INLINE
    return [_event(part, is_large) for _, part in parts]


async def response_events(
    first: TextChunk, rest: AsyncGenerator[TextChunk, None], writer: ResponseWriter, wants_timing: bool
) -> AsyncIterator[bytes]:
    """A response. An error after the headers is its failure."""
    try:
        for event in writer.opening():
            yield _named_event(event)
        async for chunk in _with_first(first, rest):
            for event in writer.events(chunk):
                yield _named_event(event)
        for event in writer.closing():
            if wants_timing:
                event["response"]["timing"] = writer.timing()
            yield _named_event(event)
    except TandemError as error:
        for event in writer.failing(error):
            yield _named_event(event)
    finally:
        await rest.aclose()


async def _with_first(
    first: TextChunk, rest: AsyncGenerator[TextChunk, None]
) -> AsyncGenerator[TextChunk, None]:
    yield first
    async for chunk in rest:
        yield chunk


def _event(data: dict[str, Any], is_large: bool = False) -> bytes:
    return b"data: " + (large_json if is_large else compact_json)(data).encode() + b"\n\n"


def _named_event(data: dict[str, Any]) -> bytes:
    return f"event: {data['type']}\n".encode() + _event(data)
