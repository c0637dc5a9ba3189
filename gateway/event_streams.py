"""Streamed answers as server-sent events. Closing a stream aborts what is left of its request, also when its task is
being cancelled."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from core.errors import TandemError
from gateway.json_text import compact_json, large_json
from gateway.openai_objects import Envelope, Json, error_object
from gateway.responses_objects import ResponseWriter
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
            for event in await _made(partial(_choice_events, chunk, envelope, wishes, timing), chunk):
                yield event
        if wishes.usage:
            yield _event(envelope.chunk(None, envelope.usage()))
        yield b"data: [DONE]\n\n"
    except TandemError as error:
        yield _event(error_object(error))
    finally:
        await rest.aclose()


def _choice_events(
    chunk: TextChunk, envelope: Envelope, wishes: StreamWishes, timing: Json | None
) -> Iterator[bytes]:
    for choice_part in envelope.shape.parts(chunk):
        part = envelope.chunk(choice_part, _usage(envelope, wishes))
        if choice_part["finish_reason"] and timing is not None:
            part["timing"] = timing
        yield _event(part, is_large=chunk.prompt is not None)


def _usage(envelope: Envelope, wishes: StreamWishes) -> dict[str, Any]:
    if wishes.running_usage:
        return envelope.usage()
    return {"usage": None} if wishes.usage else {}


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


async def _made(make: Callable[[], Iterator[bytes]], chunk: TextChunk) -> Iterable[bytes]:
    """The events of a chunk; where it has a prompt, whose scores may be many, in a thread."""
    return make() if chunk.prompt is None else await asyncio.to_thread(lambda: list(make()))


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
