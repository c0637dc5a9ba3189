"""Bodies of requests, read without holding anybody else up: a large one in a process of its own. Whoever parses JSON
holds Python's lock to the end, so that a thread would not do. Knows no protocol beyond JSON."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from core.child import die_with_parent
from core.errors import Busy, EngineFailed, InvalidRequest

Result = TypeVar("Result")
MAX_INLINE_BYTES = 64 << 10
"""What is parsed where it came in: a few milliseconds, whatever it holds."""
MAX_WAITING = 64


class BodyParser:
    """One per gateway. Starts its process with the first large body, and again should that end; close() ends it."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._num_waiting = 0

    async def parse(self, raw: bytes, parse: Callable[[bytes], Result]) -> Result:
        """What `parse` makes of `raw`; it and its result must be such that pickle can pass them on. Raises what it
        raises of InvalidRequest; Busy when too many large bodies wait."""
        if len(raw) <= MAX_INLINE_BYTES:
            return parse(raw)
        if self._num_waiting >= MAX_WAITING:
            raise Busy("too many large bodies wait to be read")
        self._num_waiting += 1
        try:
            return await self._elsewhere(raw, parse)
        finally:
            self._num_waiting -= 1

    async def close(self) -> None:
        if self._pool is not None:
            await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)

    async def _elsewhere(self, raw: bytes, parse: Callable[[bytes], Result]) -> Result:
        pool = self._pool = self._pool or ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), _start, (os.getpid(),)
        )
        try:
            outcome = await asyncio.get_running_loop().run_in_executor(pool, _outcome, raw, parse)
        except BrokenProcessPool:
            self._pool = None if self._pool is pool else self._pool
            raise EngineFailed("the process that reads large bodies has ended") from None
        if isinstance(outcome, _Refused):
            raise InvalidRequest(*outcome)
        return outcome


class _Refused(tuple[str, str]):
    """An InvalidRequest's field and message: errors with several arguments do not come through pickle."""


def _outcome(raw: bytes, parse: Callable[[bytes], Result]) -> Result | _Refused:
    try:
        return parse(raw)
    except InvalidRequest as error:
        return _Refused((error.field, str(error)))


def _start(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)
