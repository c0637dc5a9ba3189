"""A gateway's mirror of the index, kept up to date: it follows the stream of events, and takes a worker's snapshot
when it meets it and when a number is missing.

    position ──── snapshot taken here ──── events read from `position` on, in order
                  may already have some of these: each says what is, so that it may be said again

While Redis is away the mirror stays as it is.
"""

import asyncio
from collections.abc import Iterable
from typing import Any, Protocol

from prometheus_client import Counter

from cluster.block_events import BlockEvent, read_event
from cluster.block_index import BlockIndex
from cluster.store import Store
from core.ids import BlockHash, Epoch, WorkerId

POLL_S = 0.05
READ_EVENTS = 64
CHECK_S = 1.0
START = b"0-0"

SNAPSHOTS = Counter(
    "tandem_prefix_index_snapshots", "Times that all blocks of a worker were read from Redis.", ["cause"]
)


class Mirror(Protocol):
    """What is kept up to date. Its sweeps are run here, a slice at a time."""

    def add(self, epoch: Epoch) -> None: ...

    def remove(self, epoch: Epoch) -> Iterable[None] | None: ...

    def replace(self, epoch: Epoch, hashes: Iterable[BlockHash]) -> Iterable[None] | None: ...

    def store(self, epoch: Epoch, hashes: Iterable[BlockHash]) -> None: ...

    def discard(self, epoch: Epoch, hashes: Iterable[BlockHash]) -> None: ...


class _Followed:
    """How far one incarnation's events were heard."""

    def __init__(self, worker_id: WorkerId) -> None:
        self.worker_id = worker_id
        self.sequence = 0


class BlockFeed:
    """`run()` it; `follow` and `leave` say which workers matter."""

    def __init__(self, store: Store, index: BlockIndex, mirror: Mirror) -> None:
        self._store = store
        self._index = index
        self._mirror = mirror
        self._followed: dict[Epoch, _Followed] = {}
        self._due: dict[Epoch, str] = {}  # whose snapshot is to be taken, and why
        self._position: bytes | None = None
        self._num_idle = 0

    @property
    def is_whole(self) -> bool:
        """Everything that is followed was heard of since it was met."""
        return not self._due

    def follow(self, worker_id: WorkerId, epoch: Epoch) -> None:
        self._mirror.add(epoch)
        self._followed[epoch] = _Followed(worker_id)
        self._due[epoch] = "met"

    async def leave(self, epoch: Epoch) -> None:
        """It holds nothing any more."""
        self._followed.pop(epoch, None)
        self._due.pop(epoch, None)
        await _run_slowly(self._mirror.remove(epoch))

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.catch_up()
            await asyncio.sleep(POLL_S)

    async def catch_up(self) -> None:
        """Read what there is to read now."""
        if self._position is None:
            self._position = await self._last_position()
        if self._position is None:
            return
        for epoch in list(self._due):
            await self._take_snapshot(epoch)
        while entries := await self._read():
            self._num_idle = 0
            for position, fields in entries:
                self._position = position
                event = read_event(fields)
                if event is not None and event.epoch in self._followed:
                    await self._apply(event, self._followed[event.epoch])
            if len(entries) < READ_EVENTS:
                break
        await self._check_position()

    async def _take_snapshot(self, epoch: Epoch) -> None:
        followed = self._followed.get(epoch)
        if followed is None:
            return
        snapshot = await self._index.held_by(followed.worker_id, epoch)
        if snapshot is not None and self._followed.get(epoch) is followed:
            SNAPSHOTS.labels(cause=self._due.pop(epoch)).inc()
            followed.sequence, held = snapshot
            await _run_slowly(self._mirror.replace(epoch, held))

    async def _apply(self, event: BlockEvent, followed: _Followed) -> None:
        if event.sequence > followed.sequence + 1:
            self._due[event.epoch] = "gap"
        followed.sequence = max(followed.sequence, event.sequence)
        if event.is_cleared:
            await _run_slowly(self._mirror.replace(event.epoch, ()))
        self._mirror.store(event.epoch, event.stored)
        self._mirror.discard(event.epoch, event.removed)

    async def _read(self) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """The next entries; none as well when Redis does not answer."""
        streams = {self._store.keys.events: self._position}
        answer = await self._store.call(lambda redis: redis.xread(streams, READ_EVENTS), operation="events")
        return answer[0][1] if answer else []

    async def _last_position(self) -> bytes | None:
        """The newest entry's; None when Redis does not answer."""

        async def newest(redis: Any) -> bytes:
            entries = await redis.xrevrange(self._store.keys.events, count=1)
            return bytes(entries[0][0]) if entries else START

        return await self._store.call(newest, operation="events")

    async def _check_position(self) -> None:
        """A stream that was made anew, by a clock that is behind, would have nothing to read for long: go on at its
        start. Whoever's number is missing there gets its snapshot."""
        self._num_idle += 1
        if self._num_idle * POLL_S < CHECK_S:
            return
        self._num_idle = 0
        newest = await self._last_position()
        if newest is not None and self._position is not None and _time(newest) < _time(self._position):
            self._position = START


def _time(position: bytes) -> tuple[int, int]:
    milliseconds, _, number = position.partition(b"-")
    return int(milliseconds), int(number)


async def _run_slowly(sweep: Iterable[None] | None) -> None:
    for _ in sweep or ():
        await asyncio.sleep(0)
