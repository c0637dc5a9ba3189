"""Which worker holds which block, as a hint in Redis: the answer may be stale, a miss only costs a computation.

    block:<hash>         set of holders, each epoch (8 bytes, little-endian) + tier (1 byte)
    blocks:<id>:<epoch>  set of hashes: a snapshot for who lost count, and what to drop when the worker is gone
    sequence:<id>:<epoch>  number of the last batch of changes that these have
    events               stream: each worker's changes in batches, numbered (`cluster/block_events.py`)

An epoch is random and never reused, so it names the worker as well; readers drop holders whose epoch is not live.
Gateways follow the stream (`cluster/block_feed.py`) and ask Redis only for what they have not heard yet.
"""

import asyncio
import contextlib
import logging
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.block_events import BlockEvent
from cluster.registry import MAX_EVENTS
from cluster.store import Store
from core.block_hash import HASH_BYTES
from core.clock import loop_time
from core.ids import BlockHash, Epoch, WorkerId

logger = logging.getLogger(__name__)
LOOKUP_LIMIT_S = 0.05
ROW_LIFETIME_S = 600
PUBLISH_S = 0.1
PUBLISH_BATCH = 512
MAX_PENDING = 131072
SNAPSHOT_PAGE = 2048
TIER_POOL = 0
_HOLDER = struct.Struct("<qB")

_LONGEST_PREFIX = """
local depth = {}
for i, key in ipairs(KEYS) do
    local holders = redis.call('SMEMBERS', key)
    local found = false
    for _, holder in ipairs(holders) do
        if (depth[holder] or 0) == i - 1 then
            depth[holder] = i
            found = true
        end
    end
    if not found then break end
end
local flat = {}
for holder, count in pairs(depth) do
    flat[#flat + 1] = holder
    flat[#flat + 1] = count
end
return flat
"""


class BlockIndex:
    """The readers' side."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._script = store.redis.register_script(_LONGEST_PREFIX)

    async def longest_prefix(self, chain: Sequence[BlockHash]) -> dict[Epoch, int]:
        """Leading blocks of `chain` held by each epoch, in one round trip; {} when Redis is too slow to be of use."""
        if not chain:
            return {}
        keys = [self._store.keys.block(block_hash) for block_hash in chain]
        flat = await self._store.call(
            lambda redis: self._script(keys=keys, client=redis), LOOKUP_LIMIT_S, "prefix_lookup"
        )
        depths: dict[Epoch, int] = {}
        for holder, count in zip((flat or [])[::2], (flat or [])[1::2], strict=True):
            if len(holder) == _HOLDER.size:
                depths[Epoch(_HOLDER.unpack(holder)[0])] = int(count)
        return depths

    async def held_by(self, worker_id: WorkerId, epoch: Epoch) -> tuple[int, list[BlockHash]] | None:
        """Everything that an incarnation holds, read page by page, after the number of a batch of changes that it
        has, with later ones or some of them; None when Redis did not tell all of it."""
        keys = self._store.keys
        mine = keys.blocks_of(worker_id, epoch)
        held: list[BlockHash] = []
        cursor = 0

        async def read_sequence(redis: Any) -> int:
            value = await redis.get(keys.sequence_of(worker_id, epoch)) or b""
            return int(value) if value.isdigit() else 0

        sequence = await self._store.call(read_sequence, operation="snapshot")
        if sequence is None:
            return None

        async def read_page(redis: Any) -> tuple[int, list[bytes]]:
            cursor_and_members: tuple[int, list[bytes]] = await redis.sscan(mine, cursor, count=SNAPSHOT_PAGE)
            return cursor_and_members

        while True:
            page = await self._store.call(read_page, operation="snapshot")
            if page is None:
                return None
            cursor, members = page
            held += [BlockHash(member) for member in members if len(member) == HASH_BYTES]
            if not cursor:
                return sequence, held

    async def drop(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """Remove every row of an incarnation that is gone."""
        await self._store.call(
            lambda redis: _drop(self._store, redis, worker_id, epoch), limit_s=10.0, operation="drop_blocks"
        )


class BlockPublisher:
    """One worker's side: gathers its cache's changes and writes them in batches that no request waits for."""

    def __init__(
        self,
        store: Store,
        worker_id: WorkerId,
        epoch: Epoch,
        refresh_s: float = ROW_LIFETIME_S / 2,
        max_pending: int = MAX_PENDING,
    ) -> None:
        """Everything held is written anew every `refresh_s`, before its rows expire. More than `max_pending` changes
        that Redis does not take are not kept: it gets all that is held when it takes some again."""
        self._store = store
        self._refresh_s = refresh_s
        self._max_pending = max_pending
        self._worker_id = worker_id
        self._take(epoch)
        self._held: set[BlockHash] = set()
        self._pending: dict[BlockHash, bool] = {}
        self._must_clear = False
        self._changed = asyncio.Event()

    async def renew(self, epoch: Epoch) -> None:
        """The worker goes on as another incarnation: it holds the same blocks. The rows of the old one are dropped by
        whoever misses it."""
        self._take(epoch)
        await self.republish()

    def _take(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self._sequence = 0
        self._holder = _HOLDER.pack(epoch, TIER_POOL)

    def note(self, is_stored: bool, block_hash: BlockHash) -> None:
        """Record one change; the last one for a hash counts."""
        (self._held.add if is_stored else self._held.discard)(block_hash)
        self._pending[block_hash] = is_stored
        if len(self._pending) > max(self._max_pending, len(self._held)):
            self._pending.clear()
            self._must_clear = True
        self._changed.set()

    async def republish(self) -> None:
        """Write everything again: Redis has lost it, or its rows grow old."""
        self._pending.update(dict.fromkeys(self._held, True))
        self._changed.set()

    async def run(self) -> None:
        """Publish until cancelled; what Redis did not take is kept for the next try."""
        refresh_at_s = loop_time() + self._refresh_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(refresh_at_s):
                    await self._changed.wait()
            if loop_time() >= refresh_at_s:
                refresh_at_s = loop_time() + self._refresh_s
                await self.republish()
            self._changed.clear()
            while (self._pending or self._must_clear) and await self._publish_batch():
                pass
            await asyncio.sleep(PUBLISH_S)
            if self._pending or self._must_clear:
                self._changed.set()

    async def withdraw(self) -> None:
        """Remove all of this incarnation's rows."""
        self._pending.clear()
        await self._store.call(
            lambda redis: _drop(self._store, redis, self._worker_id, self._epoch),
            limit_s=10.0,
            operation="drop_blocks",
        )

    async def _publish_batch(self) -> bool:
        """True once Redis has taken the next batch. A batch that it may or may not have taken goes again under
        another number: who has heard neither sees the gap."""
        if self._must_clear and not await self._clear():
            return False
        batch = dict(list(self._pending.items())[:PUBLISH_BATCH])
        if not batch:
            return True
        self._sequence += 1
        done = await self._store.call(lambda redis: self._write(redis, batch), operation="publish_blocks")
        for block_hash, is_stored in batch.items() if done else ():
            if self._pending.get(block_hash) is is_stored:
                del self._pending[block_hash]
        return bool(done)

    async def _clear(self) -> bool:
        """Begin anew: what was published is dropped, what is held is to be published."""
        self._sequence += 1

        async def start_over(redis: Any) -> bool:
            keys = self._store.keys
            await _drop(self._store, redis, self._worker_id, self._epoch)
            await redis.set(keys.sequence_of(self._worker_id, self._epoch), self._sequence, ex=ROW_LIFETIME_S)
            event = BlockEvent(self._epoch, self._sequence, is_cleared=True)
            await event.add_to(redis, keys.events, MAX_EVENTS)
            return True

        if not await self._store.call(start_over, limit_s=10.0, operation="publish_blocks"):
            return False
        self._must_clear = False
        await self.republish()
        return True

    async def _write(self, redis: Any, batch: Mapping[BlockHash, bool]) -> bool:
        keys = self._store.keys
        mine = keys.blocks_of(self._worker_id, self._epoch)
        stored = [block_hash for block_hash, is_stored in batch.items() if is_stored]
        removed = [block_hash for block_hash, is_stored in batch.items() if not is_stored]
        async with redis.pipeline(transaction=False) as pipe:
            for block_hash in stored:
                row = keys.block(block_hash)
                pipe.sadd(row, self._holder)
                pipe.expire(row, ROW_LIFETIME_S)
            for block_hash in removed:
                pipe.srem(keys.block(block_hash), self._holder)
            if stored:
                pipe.sadd(mine, *stored)
            if removed:
                pipe.srem(mine, *removed)
            pipe.expire(mine, ROW_LIFETIME_S)
            pipe.set(keys.sequence_of(self._worker_id, self._epoch), self._sequence, ex=ROW_LIFETIME_S)
            event = BlockEvent(self._epoch, self._sequence, stored, removed)
            event.add_to(pipe, keys.events, MAX_EVENTS)
            await pipe.execute()
        return True


async def _drop(store: Store, redis: Any, worker_id: WorkerId, epoch: Epoch) -> None:
    mine = store.keys.blocks_of(worker_id, epoch)
    holder = _HOLDER.pack(epoch, TIER_POOL)
    while hashes := await redis.spop(mine, PUBLISH_BATCH):
        async with redis.pipeline(transaction=False) as pipe:
            for block_hash in hashes:
                pipe.srem(store.keys.block(BlockHash(block_hash)), holder)
            await pipe.execute()
    await redis.delete(store.keys.sequence_of(worker_id, epoch))
