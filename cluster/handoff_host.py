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
from cluster.tracing import NO_TRACING, Attributes, HandoffTrace, Tracing
from core.block_hash import MAX_SALT_BYTES
from core.errors import Cancelled, DeadlineExceeded, InvalidRequest, StaleEpoch, TandemError
from core.handoff import Handoff, HandoffState
from core.ids import Epoch, HandoffId
from core.logs import about_handoff
from core.tombstones import Tombstones

logger = logging.getLogger(__name__)
TOMBSTONE_S = 600.0
EXPIRY_SLACK_S = 5.0


class Cancellable(Protocol):
    """A handoff as its tier keeps it."""

    id: HandoffId
    lifetime: Handoff

    async def cancel(self) -> bool:
        """Stop its transfer; True once nothing of it touches a pool any more."""
        ...


H = TypeVar("H", bound=Cancellable)


class Entry(Generic[H, Event]):
    """One live handoff of one session. `task` runs its transfer, `ending` its end, in state `outcome`; `expiry` ends
    what its gateway has forgotten. `trace` is of what the worker does for it."""

    __slots__ = ("ending", "events", "expiry", "handoff", "is_quiet", "outcome", "task", "trace")

    def __init__(self, handoff: H, events: Outbox[Event], trace: HandoffTrace) -> None:
        self.handoff = handoff
        self.trace = trace
        self.events = events
        self.task: asyncio.Task[None] | None = None
        self.ending: asyncio.Task[None] | None = None
        self.expiry: asyncio.TimerHandle | None = None
        self.outcome = HandoffState.ABORTED
        self.is_quiet = True


class HandoffHost(SessionHost[Command, Event], Generic[Command, Event, H]):
    """Owns the table of live handoffs and the tombstones of ended ones. Everything runs on one event loop."""

    def __init__(self, epoch: Epoch, tracing: Tracing = NO_TRACING) -> None:
        super().__init__()
        self._epoch = epoch
        self._tracing = tracing
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

    def fence(self, epoch: Epoch) -> None:
        """Take a new epoch: every session ends and every handoff with it; commands for the old one are stale."""
        self._epoch = epoch
        self.end_sessions()

    def find(self, handoff_id: HandoffId) -> Entry[H, Event] | None:
        return self._entries.get(handoff_id)

    def may_start(self, handoff_id: HandoffId, epoch: int, cache_salt: bytes, events: Outbox[Event]) -> bool:
        """Whether a handoff is new here. One for another epoch, aborted before it came, or with a salt that is too
        long to hash with, is answered with a failure; a repeated one is already on its way and gets no further
        answer."""
        if epoch != self._epoch:
            events.put(self.failed(handoff_id, StaleEpoch("this worker has restarted since")))
            return False
        if handoff_id in self._over:
            events.put(self.failed(handoff_id, Cancelled("it is over already")))
            return False
        if len(cache_salt) > MAX_SALT_BYTES:
            message = f"{len(cache_salt)} bytes are more than the {MAX_SALT_BYTES} of a salt"
            events.put(self.failed(handoff_id, InvalidRequest("cache_salt", message)))
            return False
        return handoff_id not in self._entries

    def admit(
        self, handoff: H, events: Outbox[Event], deadline_s: float, trace_parent: str = ""
    ) -> Entry[H, Event]:
        """It is live from now on, for what remains of its request's time: the gateway ends it before that."""
        attributes: Attributes = {
            "tandem.request_id": handoff.id.request_id,
            "tandem.attempt": handoff.id.attempt,
        }
        trace = self._tracing.handoff(trace_parent, attributes)
        entry = self._entries[handoff.id] = Entry(handoff, events, trace)
        entry.expiry = asyncio.get_running_loop().call_later(
            deadline_s + EXPIRY_SLACK_S, self.fail, entry, DeadlineExceeded("its gateway never ended it")
        )
        return entry

    def abort(self, handoff_id: HandoffId, events: Outbox[Event]) -> None:
        """Two-sided and idempotent; may come before what it aborts. Always answered."""
        self._over.add(handoff_id)
        entry = self._entries.get(handoff_id)
        if entry is None:
            events.put(self.aborted(handoff_id, True))
        elif entry.ending is None:
            entry.ending = self.spawn(self._end(entry), entry.handoff.id.request_id)

    def fail(self, entry: Entry[H, Event], error: TandemError) -> None:
        """Tell the gateway and end it."""
        handoff_id = entry.handoff.id
        logger.warning("handoff failed: %s", error, extra=about_handoff(handoff_id))
        entry.trace.close(str(error))
        entry.events.put(self.failed(handoff_id, error))
        entry.outcome = HandoffState.FAILED
        self._over.add(handoff_id)
        if entry.task is asyncio.current_task():
            entry.task = None  # the transfer itself failed: it is ending, and must not wait for itself
        if entry.ending is None:
            entry.ending = self.spawn(self._end(entry), entry.handoff.id.request_id)

    def forget(self, handoff_id: HandoffId) -> bool:
        """It ended by itself. False when it was not live: then nothing changes."""
        entry = self._entries.pop(handoff_id, None)
        if entry is None:
            return False
        _stop(entry.expiry)
        entry.trace.close()
        self._over.add(handoff_id)
        return True

    def ended(self, handoff_id: HandoffId) -> None:
        """The engine has ended an aborted one."""
        entry = self._entries.pop(handoff_id)
        _stop(entry.expiry)
        entry.trace.close()
        entry.events.put(self.aborted(handoff_id, entry.is_quiet))

    def on_session_end(self, events: Outbox[Event]) -> None:
        for handoff_id in [key for key, entry in self._entries.items() if entry.events is events]:
            self.abort(handoff_id, events)

    async def stop_transfer(self, entry: Entry[H, Event]) -> None:
        """Afterwards `is_quiet` says whether nothing of it touches any pool."""
        if entry.task is not None:
            entry.task.cancel()
            await asyncio.wait([entry.task])
        entry.is_quiet = await entry.handoff.cancel()

    async def _end(self, entry: Entry[H, Event]) -> None:
        """Stop the transfer before the blocks that it touches are given back."""
        await self.stop_transfer(entry)
        entry.handoff.lifetime.end(entry.outcome)
        await self.end_work(entry)


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
