"""Streams that outlive the connection that asked for them: their chunks are kept until nobody has read for a while.
Knows nothing of what a chunk is.

    hold() ──pump──► chunks[0..n)                  one reader at a time; a new one supersedes
                        read(offset) ──►           nobody reads for grace_s: forgotten, and the request aborted

A request's tokens bound the chunks of its stream, `max_streams` bounds the streams: the pump waits for no reader.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Callable
from typing import Generic, TypeVar

from core.errors import Busy, Cancelled, EngineFailed, InvalidRequest, StreamNotFound, TandemError

GRACE_S = 30.0
MAX_STREAMS = 256
TOKEN_BYTES = 24
Chunk = TypeVar("Chunk")


class ResumableStreams(Generic[Chunk]):
    """Those of one gateway, by a token that only who asked for the stream can know."""

    def __init__(self, grace_s: float = GRACE_S, max_streams: int = MAX_STREAMS) -> None:
        self._grace_s = grace_s
        self._max_streams = max_streams
        self._streams: dict[str, _HeldStream[Chunk]] = {}
        self._pumps: set[asyncio.Task[None]] = set()  # the event loop alone would not keep them alive

    def __len__(self) -> int:
        return len(self._streams)

    def check_room(self) -> None:
        """Whether one more can be held; of those that have ended, the oldest that nobody reads makes room for it.
        Raises Busy."""
        if len(self._streams) < self._max_streams:
            return
        ended = next((token for token, stream in self._streams.items() if stream.is_idle), None)
        if ended is None:
            raise Busy(f"{self._max_streams} resumable streams are held")
        self._forget(ended)

    def hold(
        self, make_source: Callable[[str], AsyncGenerator[Chunk, None]], owner: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        """Begin the stream `make_source(token)` and read it from its start. The source is iterated by a task of its
        own, and closed when the stream had no reader for `grace_s`. Only its `owner` can resume it. Raises Busy."""
        self.check_room()
        token = secrets.token_urlsafe(TOKEN_BYTES)
        stream = self._streams[token] = _HeldStream(make_source(token), owner)
        self._pumps.add(stream.pump)
        stream.pump.add_done_callback(self._pumps.discard)
        self._expire_later(token)
        return self.resume(token, 0, owner)

    async def resume(self, token: str, offset: int, owner: str = "") -> AsyncGenerator[Chunk, None]:
        """The stream's chunks from the `offset`th on, as they come. Ends as the stream ended, with its error if any.
        Raises StreamNotFound for a token that is unknown, expired or of another owner, InvalidRequest for an offset
        beyond what there is, Cancelled when another reader takes over."""
        stream = self._streams.get(token)
        if stream is None or stream.owner != owner:
            raise StreamNotFound("no stream is held under this token")
        stream.check(offset)
        turn = stream.take_over()
        try:
            async with contextlib.aclosing(stream.chunks_from(offset, turn)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            if stream.leave(turn):
                self._expire_later(token)

    def _expire_later(self, token: str) -> None:
        stream = self._streams.get(token)
        if stream is not None:
            loop = asyncio.get_running_loop()
            stream.expiry = loop.call_later(self._grace_s, self._forget, token)

    def _forget(self, token: str) -> None:
        stream = self._streams.pop(token)
        stream.close()


class _HeldStream(Generic[Chunk]):
    """One stream's chunks so far, and whose turn it is to read them. `expiry` is set while nobody does."""

    def __init__(self, source: AsyncGenerator[Chunk, None], owner: str) -> None:
        self.owner = owner
        self.expiry: asyncio.TimerHandle | None = None
        self._chunks: list[Chunk] = []
        self._error: TandemError | None = EngineFailed("internal error")  # until it has ended some other way
        self._changed = asyncio.Event()
        self._has_ended = False
        self._turn = 0
        self.pump = asyncio.create_task(self._take(source))

    @property
    def is_idle(self) -> bool:
        """It has ended, and nobody reads it."""
        return self._has_ended and self.expiry is not None

    def check(self, offset: int) -> None:
        """Raises InvalidRequest for an offset beyond what there is."""
        if offset > len(self._chunks):
            raise InvalidRequest("offset", f"the stream has {len(self._chunks)} chunks so far, not {offset}")

    def take_over(self) -> int:
        """Whoever read until now is told; the new reader's turn."""
        self._stop_expiry()
        self._turn += 1
        self._tell()
        return self._turn

    def leave(self, turn: int) -> bool:
        """Whether that was the reader and there is none now."""
        return turn == self._turn

    def close(self) -> None:
        self._stop_expiry()
        self.pump.cancel()

    async def chunks_from(self, offset: int, turn: int) -> AsyncGenerator[Chunk, None]:
        while True:
            changed = self._changed
            while offset < len(self._chunks) and turn == self._turn:
                yield self._chunks[offset]
                offset += 1
            if turn != self._turn:
                raise Cancelled("another reader took the stream over")
            if self._has_ended:
                break
            await changed.wait()
        if self._error is not None:
            raise self._error

    async def _take(self, source: AsyncGenerator[Chunk, None]) -> None:
        try:
            async with contextlib.aclosing(source) as chunks:
                async for chunk in chunks:
                    self._chunks.append(chunk)
                    self._tell()
            self._error = None
        except TandemError as error:
            self._error = error
        finally:
            self._has_ended = True
            self._tell()

    def _tell(self) -> None:
        """Wake whoever waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _stop_expiry(self) -> None:
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None
