"""Blocks that enter and leave the prefix cache beside what sequences do: fetched from another worker or from a tier
below the pool, lent to whoever copies them there. The same for both tiers. No I/O.

    FetchBlocks ─► in flight, written by the service ─► Fetched ─► cached | free
    LendBlocks  ─► leased, read by the service        ─► EndLoan ─► cached

Neither takes anything from a sequence: a fetch gets blocks that nobody needs to keep, a loan takes none.
"""

from typing import NamedTuple

from core.ids import BlockHash, BlockId, HandoffId
from engine.block_pool import BlockState
from engine.engine import Engine
from engine.messages import EndLoan, FetchBlocks, Fetched, Fetching, LendBlocks, Lent

Traffic = FetchBlocks | Fetched | LendBlocks | EndLoan


class Fetch(NamedTuple):
    """`block_ids` are being written with what `hashes` name; `shared` precede them, kept meanwhile."""

    hashes: list[BlockHash]
    block_ids: list[BlockId]
    shared: list[BlockId]


class CacheTraffic:
    """Owns the blocks that are on their way, in either direction."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pool = engine.scheduler.pool
        self._fetches: dict[HandoffId, Fetch] = {}
        self._loans: dict[HandoffId, list[BlockId]] = {}
        self._outdated: set[HandoffId] = set()

    def handle(self, command: Traffic) -> list[Fetching | Lent]:
        """Apply one command; its answers. A repeated one changes nothing and has none."""
        match command:
            case FetchBlocks():
                return [] if command.id in self._fetches else [self._fetch(command)]
            case Fetched():
                self._end_fetch(command)
            case LendBlocks():
                return [] if command.id in self._loans else [self._lend(command)]
            case EndLoan():
                self._pool.release(self._loans.pop(command.id, []), BlockState.LEASED)
        return []

    def clear(self) -> None:
        """The cache was cleared: what is on its way belongs to the one before."""
        self._outdated |= set(self._fetches)

    def _fetch(self, command: FetchBlocks) -> Fetching:
        """As many of the lacking blocks as there is room for, with one to spare for each running sequence."""
        pool, scheduler = self._pool, self._engine.scheduler
        shared = pool.lookup(command.hashes)
        pool.acquire(shared, BlockState.LEASED)
        num_spare = max(pool.num_available - len(scheduler.running), 0) if pool.has_prefix_cache else 0
        lacking = command.hashes[len(shared) :][:num_spare]
        block_ids = pool.allocate(len(lacking), BlockState.IN_FLIGHT)
        assert block_ids is not None, (len(lacking), pool.num_available)
        self._fetches[command.id] = Fetch(lacking, block_ids, shared)
        return Fetching(command.id, len(shared), block_ids)

    def _end_fetch(self, command: Fetched) -> None:
        fetch = self._fetches.pop(command.id, None)
        if fetch is None:
            return
        if command.is_whole and command.id not in self._outdated:
            self._engine.take_in(fetch.block_ids)
            for block, block_hash in zip(fetch.block_ids, fetch.hashes, strict=True):
                self._pool.register(block, block_hash)
        self._outdated.discard(command.id)
        self._pool.release(fetch.block_ids, BlockState.IN_FLIGHT)
        self._pool.release(fetch.shared, BlockState.LEASED)

    def _lend(self, command: LendBlocks) -> Lent:
        found = self._pool.find(command.hashes)
        block_ids = list(found.values())
        self._pool.acquire(block_ids, BlockState.LEASED)
        self._engine.publish(block_ids)
        self._loans[command.id] = block_ids
        return Lent(command.id, list(found), block_ids)
