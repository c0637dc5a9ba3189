"""The two halves of a session between a gateway and a worker, for either end. Knows neither gRPC nor messages.

put() put() ─► Outbox ─► batches(): all that gathered, as one list; an empty list is a keepalive
heard_within(): a peer's messages, or WorkerLost once it was silent too long
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from typing import Generic, TypeVar

from core.clock import Clock, loop_time
from core.errors import WorkerLost
from core.logs import about

KEEPALIVE_S = 1.0
SILENCE_S = 3.0
MAX_OUTBOX_AGE_S = 10.0
MAX_OUTBOX_BYTES = 64 << 20

Item = TypeVar("Item")
Command = TypeVar("Command")
Event = TypeVar("Event")
logger = logging.getLogger(__name__)


class Outbox(Generic[Item]):
    """Items for the peer. Never blocks the one who puts; a peer that does not take them in time breaks the session:
    then batches() ends and put() drops, as whatever the session carried is aborted anyway."""

    def __init__(
        self, max_bytes: int = MAX_OUTBOX_BYTES, max_age_s: float = MAX_OUTBOX_AGE_S, clock: Clock = loop_time
    ) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._items: list[Item] = []
        self._num_bytes = 0
        self._oldest_s = 0.0
        self._wake = asyncio.Event()
        self.is_closed = False

    def put(self, item: Item, num_bytes: int = 64) -> None:
        if self.is_closed:
            return
        if not self._items:
            self._oldest_s = self._clock()
        self._items.append(item)
        self._num_bytes += num_bytes
        too_old = self._clock() - self._oldest_s > self._max_age_s
        if self._num_bytes > self._max_bytes or too_old:
            self.close()
        self._wake.set()

    def wake(self) -> None:
        """A batch at once, though there may be nothing to send: what travels with it has changed."""
        self._wake.set()

    def close(self) -> None:
        """End batches() without sending what is left."""
        self.is_closed = True
        self._items.clear()
        self._wake.set()

    async def batches(self, keepalive_s: float = KEEPALIVE_S) -> AsyncIterator[list[Item]]:
        """What gathered since the last batch, as soon as there is something; [] when there was nothing for
        `keepalive_s`. Ends when closed."""
        while not self.is_closed:
            try:
                async with asyncio.timeout(keepalive_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            items, self._items, self._num_bytes = self._items, [], 0
            if not self.is_closed:
                yield items


async def heard_within(messages: AsyncIterator[Item], silence_s: float = SILENCE_S) -> AsyncIterator[Item]:
    """`messages` until they end. Raises WorkerLost when none came for `silence_s`: the peer sends keepalives."""
    iterator = aiter(messages)
    while True:
        try:
            async with asyncio.timeout(silence_s):
                message = await anext(iterator)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise WorkerLost(f"nothing was heard for {silence_s:g} s") from None
        yield message


class SessionHost(ABC, Generic[Command, Event]):
    """A worker's side of all its sessions. The variants say what a command does and what a session's end means."""

    def __init__(self, silence_s: float = SILENCE_S) -> None:
        self._silence_s = silence_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[Outbox[Event]] = set()
        self.is_draining = False

    @abstractmethod
    def on_command(self, command: Command, events: Outbox[Event]) -> None:
        """Act on one command at once, without waiting; answers go to `events`, now or later."""

    @abstractmethod
    def on_session_end(self, events: Outbox[Event]) -> None:
        """Abort exactly what came through this session. `events` is closed already."""

    async def serve(
        self, hello: Event, commands: AsyncIterator[Command | None]
    ) -> AsyncIterator[list[Event]]:
        """The event batches of one session, `hello` first. `commands` holds None for each keepalive."""
        events: Outbox[Event] = Outbox()
        events.put(hello)
        self._open.add(events)
        reader = self.spawn(self._read(commands, events))
        try:
            async for batch in events.batches():
                yield batch
        finally:
            reader.cancel()
            events.close()
            self._open.discard(events)
            self.on_session_end(events)

    def drain(self) -> None:
        """Nothing new is wanted any more; the variants tell it with their load, now and later."""
        self.is_draining = True
        for events in self._open:
            events.wake()

    def end_sessions(self) -> None:
        """Each ends as if its peer had gone."""
        for events in list(self._open):
            events.close()
            self.on_session_end(events)

    async def _read(self, commands: AsyncIterator[Command | None], events: Outbox[Event]) -> None:
        try:
            async for command in heard_within(commands, self._silence_s):
                if command is not None:
                    self.on_command(command, events)
        except WorkerLost as error:
            logger.warning("session broken: %s", error)
        finally:
            events.close()

    def spawn(self, work: Coroutine[None, None, None], request_id: str = "") -> asyncio.Task[None]:
        """Run `work`, holding a reference to it until it ends. An exception that it did not expect is logged, with
        the request that it was for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, request_id))
        return task

    def _ended(self, request_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed", task.get_coro(), exc_info=error, extra=about(request_id))
