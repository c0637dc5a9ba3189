"""What both tiers' services do with handoffs whatever passes in them: admit each once, end it exactly once, and give
its blocks back only when nothing touches them any more. Knows neither messages nor engines.

    admit ─► live ─┬─ forget: it ended by itself                              (released, last token)
                   └─ abort, fail, the session's end ─► cancel the transfer ─► end its work ─► ended
"""

import asyncio
import logging
from abc import abstractmethod
from typing import Generic, Protocol, TypeVar

from cluster.session import Command, Event, Outbox, SessionHost
from core.errors import Cancelled, StaleEpoch, TandemError
from core.ids import Epoch, HandoffId
from core.tombstones import Tombstones

logger = logging.getLogger(__name__)
TOMBSTONE_S = 600.0


class Cancellable(Protocol):
    """A handoff as its tier keeps it."""

    id: HandoffId

    async def cancel(self) -> bool:
        """Stop its transfer; True once nothing of it touches a pool any more."""
        ...


H = TypeVar("H", bound=Cancellable)


class Entry(Generic[H, Event]):
    """One live handoff of one session. `task` runs its transfer, `ending` its end."""

    __slots__ = ("ending", "events", "handoff", "is_quiet", "task")

    def __init__(self, handoff: H, events: Outbox[Event]) -> None:
        self.handoff = handoff
        self.events = events
        self.task: asyncio.Task[None] | None = None
        self.ending: asyncio.Task[None] | None = None
        self.is_quiet = True


class HandoffHost(SessionHost[Command, Event], Generic[Command, Event, H]):
    """Owns the table of live handoffs and the tombstones of ended ones. Everything runs on one event loop."""

    def __init__(self, epoch: Epoch) -> None:
        super().__init__()
        self._epoch = epoch
        self._entries: dict[HandoffId, Entry[H, Event]] = {}
        self._over = Tombstones(TOMBSTONE_S)

    @property
    def num_handoffs(self) -> int:
        return len(self._entries)

    @abstractmethod
    def failed(self, handoff_id: HandoffId, error: TandemError) -> Event:
        """The event that tells a gateway of a handoff's failure."""

    @abstractmethod
    def aborted(self, handoff_id: HandoffId, is_quiet: bool) -> Event:
        """The event that answers an abort."""

    @abstractmethod
    async def end_work(self, entry: Entry[H, Event]) -> None:
        """Have the engine end it, now that its transfer is cancelled; the engine's answer calls ended()."""

    def find(self, handoff_id: HandoffId) -> Entry[H, Event] | None:
        return self._entries.get(handoff_id)

    def may_start(self, handoff_id: HandoffId, epoch: int, events: Outbox[Event]) -> bool:
        """Whether a handoff is new here. One for another epoch, or aborted before it came, is answered with a
        failure; a repeated one is already on its way and gets no further answer."""
        if epoch != self._epoch:
            events.put(self.failed(handoff_id, StaleEpoch("this worker has restarted since")))
            return False
        if handoff_id in self._over:
            events.put(self.failed(handoff_id, Cancelled("it is over already")))
            return False
        return handoff_id not in self._entries

    def admit(self, handoff: H, events: Outbox[Event]) -> Entry[H, Event]:
        entry = self._entries[handoff.id] = Entry(handoff, events)
        return entry

    def abort(self, handoff_id: HandoffId, events: Outbox[Event]) -> None:
        """Two-sided and idempotent; may come before what it aborts. Always answered."""
        self._over.add(handoff_id)
        entry = self._entries.get(handoff_id)
        if entry is None:
            events.put(self.aborted(handoff_id, True))
        elif entry.ending is None:
            entry.ending = self.spawn(self._end(entry))

    def fail(self, entry: Entry[H, Event], error: TandemError) -> None:
        """Tell the gateway and end it."""
        handoff_id = entry.handoff.id
        logger.warning("handoff %s failed: %s", handoff_id, error)
        entry.events.put(self.failed(handoff_id, error))
        self._over.add(handoff_id)
        if entry.task is asyncio.current_task():
            entry.task = None  # the transfer itself failed: it is ending, and must not wait for itself
        if entry.ending is None:
            entry.ending = self.spawn(self._end(entry))

    def forget(self, handoff_id: HandoffId) -> bool:
        """It ended by itself. False when it was not live: then nothing changes."""
        if self._entries.pop(handoff_id, None) is None:
            return False
        self._over.add(handoff_id)
        return True

    def ended(self, handoff_id: HandoffId) -> None:
        """The engine has ended an aborted one."""
        entry = self._entries.pop(handoff_id)
        entry.events.put(self.aborted(handoff_id, entry.is_quiet))

    def on_session_end(self, events: Outbox[Event]) -> None:
        for handoff_id in [key for key, entry in self._entries.items() if entry.events is events]:
            self.abort(handoff_id, events)

    async def _end(self, entry: Entry[H, Event]) -> None:
        """Stop the transfer before the blocks that it touches are given back."""
        if entry.task is not None:
            entry.task.cancel()
            await asyncio.wait([entry.task])
        entry.is_quiet = await entry.handoff.cancel()
        await self.end_work(entry)
