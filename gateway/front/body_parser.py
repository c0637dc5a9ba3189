"""Bodies of requests, read without holding anybody else up: a large one in a process of its own
(gateway.front.body_child). Whoever parses JSON holds Python's lock to the end, so that a thread would not do."""

import asyncio
import contextlib
import sys
from typing import Any

import msgspec

from core.child import dying_with_parent
from core.errors import Busy, EngineFailed, InvalidRequest
from gateway.front.body_child import HEADER, Task, frame
from gateway.front.readers import READERS

MAX_INLINE_BYTES = 64 << 10
"""What is parsed where it came in: a few milliseconds, whatever it holds."""
MAX_WAITING = 64
_DECODERS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    name: msgspec.msgpack.Decoder(tuple[str | None, str, reader.kind | None])  # type: ignore[name-defined]
    for name, reader in READERS.items()
}


class BodyParser:
    """One per gateway. Starts its process with the first large body, and again should that end; close() ends it."""

    def __init__(self) -> None:
        self.child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._waiting: set[asyncio.Task[Any]] = set()

    async def parse(self, name: str, raw: bytes, **options: str | bool) -> Any:
        """What the reader of that name makes of `raw`. Raises its InvalidRequest; Busy when too many large bodies
        wait; EngineFailed when the process that had it ended."""
        if len(raw) <= MAX_INLINE_BYTES:
            return READERS[name].read(raw, **options)
        if len(self._waiting) >= MAX_WAITING:
            raise Busy("too many large bodies wait to be read")
        reading = asyncio.create_task(self._read(Task(name, options, raw)))
        self._waiting.add(reading)
        reading.add_done_callback(self._waiting.discard)
        field, message, result = await asyncio.shield(
            reading
        )  # who leaves must not take the next one's answer
        if field is not None:
            raise InvalidRequest(field, message)
        return result

    async def close(self) -> None:
        for reading in list(self._waiting):
            reading.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)
        if self.child is not None:
            await self._end(self.child)

    async def _read(self, task: Task) -> Any:
        async with self._turn:
            child = self.child = self.child or await self._start()
            assert child.stdin is not None and child.stdout is not None
            try:
                child.stdin.write(frame(task))
                await child.stdin.drain()
                (length,) = HEADER.unpack(await child.stdout.readexactly(HEADER.size))
                return _DECODERS[task.reader].decode(await child.stdout.readexactly(length))
            except (ConnectionError, asyncio.IncompleteReadError):
                await self._end(child)
                raise EngineFailed("the process that reads large bodies has ended") from None

    async def _start(self) -> asyncio.subprocess.Process:
        command = dying_with_parent((sys.executable, "-m", "gateway.front.body_child"))
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)

    async def _end(self, child: asyncio.subprocess.Process) -> None:
        self.child = None
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
