"""A disk below a worker's prefix cache: what is cached is saved, what is wanted again is read before a prompt starts.

    cached ──► to be saved ── LendBlocks ─► copied to the store ─► EndLoan          in the background, oldest first
    prompt ──► on disk beyond what is cached? ── FetchBlocks ─► read into the pool ─► Fetched ─► the prompt starts

The files are `DiskStore`'s, touched by one thread of their own. The engine's steps wait for none of it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count, takewhile
from typing import Any

from core.block_hash import hash_chain, pool_chain
from core.clock import loop_time
from core.ids import BlockHash, BlockId, HandoffId, RequestId
from core.kv_region import KVRegion
from core.kv_spec import KVSpec
from core.load import DiskCounts
from kv_cache.disk_store import DiskStore
from kv_cache.engine_cache import EngineCache

logger = logging.getLogger(__name__)
SAVE_BATCH = 16
SAVE_SHARE = 0.5
"""Saving takes no more than this part of the time."""

READ_LIMIT_S = 5.0
"""A prompt waits no longer for the disk; it is computed then."""

INLINE_TOKENS = 4096
"""Longer prompts are hashed in a thread."""

NoteBlock = Callable[[bool, BlockHash], None]


class DiskTier:
    """One per worker, on its service's event loop; `run()` saves until cancelled. `note` is told of each block that
    the worker holds from now on, in its pool or on disk, or no more."""

    def __init__(
        self, store: DiskStore, region: KVRegion, spec: KVSpec, cache: EngineCache, note: NoteBlock
    ) -> None:
        self._store = store
        self._region = region
        self._spec = spec
        self._cache = cache
        self._note = note
        self._thread = ThreadPoolExecutor(1, "disk-cache")
        self._numbers = count(1)
        self._cached: set[BlockHash] = set()
        self._unsaved: dict[BlockHash, None] = {}
        self._changed = asyncio.Event()
        self._reads: dict[BlockHash, asyncio.Task[None]] = {}
        self._num_clears = 0
        for block_hash in store.hashes():
            note(True, block_hash)

    @property
    def counts(self) -> DiskCounts:
        """As they travel with the worker's load."""
        return replace(self._store.counts)

    def on_cache_change(self, is_stored: bool, block_hash: BlockHash) -> None:
        """From the engine: a block is cached, or no more."""
        if is_stored:
            self._cached.add(block_hash)
            if block_hash not in self._store:
                self._unsaved[block_hash] = None
                self._changed.set()
            self._note(True, block_hash)
        else:
            self._cached.discard(block_hash)
            self._unsaved.pop(block_hash, None)
            if block_hash not in self._store:
                self._note(False, block_hash)

    async def prepare(self, tokens: Sequence[int], salt: bytes = b"") -> None:
        """Returns when what the disk has of a prompt is cached, as far as there is room, or will not be. What goes
        wrong with reading is logged, and nobody else's concern."""
        if not self._store.counts.num_blocks:
            return

        def chained() -> Sequence[BlockHash]:
            """The last token's block is computed."""
            chain = hash_chain(tokens[:-1], self._spec.fingerprint, salt=salt)
            return pool_chain(chain, self._spec.block_size)

        chain = await asyncio.to_thread(chained) if len(tokens) > INLINE_TOKENS else chained()
        await self.prepare_blocks(chain)

    async def prepare_blocks(self, chain: Sequence[BlockHash]) -> None:
        """The same for blocks that follow one another."""
        wanted = self._wanted(chain)
        if not wanted:
            return
        reading = self._reads.get(wanted[-1])
        if reading is None:
            reading = asyncio.create_task(self._read(wanted))
            reading.add_done_callback(_log_failure)
            for block_hash in wanted:
                self._reads.setdefault(block_hash, reading)
        await asyncio.wait([reading], timeout=READ_LIMIT_S)

    def clear(self) -> None:
        """Forget everything on disk. (The engine was told to clear its cache.)"""
        self._num_clears += 1
        self._unsaved.clear()
        self._thread.submit(self._store.clear).add_done_callback(_log_failure)
        for block_hash in self._store.hashes():
            if block_hash not in self._cached:
                self._note(False, block_hash)

    async def run(self) -> None:
        """Save what is cached, a few blocks at a time."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._unsaved:
                began_s = loop_time()
                await self._save()
                await asyncio.sleep((loop_time() - began_s) * (1 / SAVE_SHARE - 1))

    async def close(self, limit_s: float) -> None:
        """Save what is left, within the limit, and close the store. run() must have ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._unsaved:
                    await self._save()
        readings = set(self._reads.values())
        for reading in readings:
            reading.cancel()
        await asyncio.gather(*readings, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown)
        self._store.close()

    def _wanted(self, chain: Sequence[BlockHash]) -> list[BlockHash]:
        """The leading blocks up to the last one that only the disk has."""
        num_cached = sum(1 for _ in takewhile(self._cached.__contains__, chain))
        num_saved = sum(1 for _ in takewhile(self._store.__contains__, chain[num_cached:]))
        return list(chain[: num_cached + num_saved]) if num_saved else []

    async def _read(self, hashes: Sequence[BlockHash]) -> None:
        """Into blocks of the pool: all that it lacks of a chain, or nothing. Not to be cancelled while its thread may
        still write."""
        handoff_id = self._new_id("read")
        try:
            fetching = await self._cache.fetch(handoff_id, hashes)
            lacking = hashes[fetching.num_cached :][: len(fetching.block_ids)]
            reading = asyncio.wrap_future(self._thread.submit(self._fill, lacking, fetching.block_ids))
            is_whole = False
            try:
                is_whole = await _to_its_end(reading)
            finally:
                self._cache.end_fetch(handoff_id, is_whole)
            self._forget(block_hash for block_hash in lacking if block_hash not in self._store)
        finally:
            for block_hash in hashes:
                self._reads.pop(block_hash, None)

    def _fill(self, hashes: Sequence[BlockHash], block_ids: Sequence[BlockId]) -> bool:
        """For the thread. Whether all are there as they were written."""
        for block_hash, block in zip(hashes, block_ids, strict=True):
            with self._region.view(block) as memory:
                if not self._store.get(block_hash, memory):
                    return False
        return True

    async def _save(self) -> None:
        """The oldest few that are cached and not saved."""
        hashes = list(self._unsaved)[:SAVE_BATCH]
        num_clears, handoff_id = self._num_clears, self._new_id("save")
        lent = await self._cache.lend(handoff_id, hashes)
        gone: list[BlockHash] = []
        try:
            if num_clears == self._num_clears:
                copying = self._thread.submit(self._copy, lent.hashes, lent.block_ids)
                gone = await _to_its_end(asyncio.wrap_future(copying))
        finally:
            self._cache.end_loan(handoff_id)
        for block_hash in hashes:
            self._unsaved.pop(block_hash, None)
        self._forget(gone)

    def _copy(self, hashes: Sequence[BlockHash], block_ids: Sequence[BlockId]) -> list[BlockHash]:
        """For the thread. What had to go from the store."""
        gone: list[BlockHash] = []
        for block_hash, block in zip(hashes, block_ids, strict=True):
            with self._region.view(block) as memory:
                gone += self._store.put(block_hash, memory)
        return gone

    def _forget(self, gone: Iterable[BlockHash]) -> None:
        """The store has these no more. What is cached of them is not saved anew: a pool that is larger than the disk
        would be written for ever."""
        for block_hash in gone:
            if block_hash not in self._cached and block_hash not in self._store:
                self._note(False, block_hash)

    def _new_id(self, what: str) -> HandoffId:
        return HandoffId(RequestId(f"disk-{what}"), next(self._numbers))


async def _to_its_end(work: "asyncio.Future[Any]") -> Any:
    """What a thread does, waited for even when the waiter is cancelled: it uses memory that is given back then."""
    while not work.done():
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            if not work.done():
                await asyncio.wait([work])
            raise
    return work.result()


def _log_failure(work: Any) -> None:
    """Of a thread's work or a task."""
    if not work.cancelled() and work.exception() is not None:
        logger.error("the disk cache failed", exc_info=work.exception())
