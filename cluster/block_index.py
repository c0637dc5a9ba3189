"""Which worker holds which block, as a hint in Redis: the answer may be stale, a miss only costs a computation.

    block:<hash>         set of holders, each epoch (8 bytes, little-endian) + tier (1 byte)
    blocks:<id>:<epoch>  set of hashes, to drop a dead worker's rows

An epoch is random and never reused, so it names the worker as well; readers drop holders whose epoch is not live.
"""

import asyncio
import contextlib
import logging
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.store import Store
from core.clock import loop_time
from core.ids import BlockHash, Epoch, WorkerId

logger = logging.getLogger(__name__)
LOOKUP_LIMIT_S = 0.05
ROW_LIFETIME_S = 600
PUBLISH_S = 0.1
PUBLISH_BATCH = 512
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

    async def drop(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """Remove every row of an incarnation that is gone."""
        await self._store.call(
            lambda redis: _drop(self._store, redis, worker_id, epoch), limit_s=10.0, operation="drop_blocks"
        )


class BlockPublisher:
    """One worker's side: gathers its cache's changes and writes them in batches that no request waits for."""

    def __init__(
        self, store: Store, worker_id: WorkerId, epoch: Epoch, refresh_s: float = ROW_LIFETIME_S / 2
    ) -> None:
        """Everything held is written anew every `refresh_s`, before its rows expire."""
        self._store = store
        self._refresh_s = refresh_s
        self._worker_id = worker_id
        self._take(epoch)
        self._held: set[BlockHash] = set()
        self._pending: dict[BlockHash, bool] = {}
        self._changed = asyncio.Event()

    async def renew(self, epoch: Epoch) -> None:
        """The worker goes on as another incarnation: it holds the same blocks. The rows of the old one are dropped by
        whoever misses it."""
        self._take(epoch)
        await self.republish()

    def _take(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self._holder = _HOLDER.pack(epoch, TIER_POOL)

    def note(self, is_stored: bool, block_hash: BlockHash) -> None:
        """Record one change; the last one for a hash counts."""
        (self._held.add if is_stored else self._held.discard)(block_hash)
        self._pending[block_hash] = is_stored
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
            while self._pending and await self._publish_batch():
                pass
            await asyncio.sleep(PUBLISH_S)
            if self._pending:
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
        batch = dict(list(self._pending.items())[:PUBLISH_BATCH])
        done = await self._store.call(lambda redis: self._write(redis, batch), operation="publish_blocks")
        for block_hash, is_stored in batch.items() if done else ():
            if self._pending.get(block_hash) is is_stored:
                del self._pending[block_hash]
        return bool(done)

    async def _write(self, redis: Any, batch: Mapping[BlockHash, bool]) -> bool:
        keys = self._store.keys
        mine = keys.blocks_of(self._worker_id, self._epoch)
        async with redis.pipeline(transaction=False) as pipe:
            for block_hash, is_stored in batch.items():
                row = keys.block(block_hash)
                if is_stored:
                    pipe.sadd(row, self._holder)
                    pipe.expire(row, ROW_LIFETIME_S)
                    pipe.sadd(mine, block_hash)
                else:
                    pipe.srem(row, self._holder)
                    pipe.srem(mine, block_hash)
            pipe.expire(mine, ROW_LIFETIME_S)
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
