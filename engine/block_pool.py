"""Who holds which block of a KV pool, and the prefix cache over the blocks nobody needs to keep. No torch, no I/O.

A block is in exactly one state. References are counted for each kind of hold; the state follows from them:

    quarantined   a writer may still touch it                                        (exclusive)
    in_flight     granted to a transfer that is writing it                           (exclusive)
    owned         in the block table of a sequence                                   (shared)
    leased        kept by the prefill side until the seal is verified                (shared)
    cached        no references, content known by its hash, first to go when room is needed
    free          no references, content meaningless

    free ──allocate──► owned | in_flight ──move──► owned | leased | quarantined ──release──► cached | free
                          cached ──acquire──► owned | leased

The states sum to the number of blocks: `check()` proves it, `counts` is O(1).
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from core.ids import BlockHash, BlockId


class BlockState(StrEnum):
    FREE = "free"
    CACHED = "cached"
    OWNED = "owned"
    LEASED = "leased"
    IN_FLIGHT = "in_flight"
    QUARANTINED = "quarantined"


_HOLDS = (BlockState.QUARANTINED, BlockState.IN_FLIGHT, BlockState.OWNED, BlockState.LEASED)
_BITS = 20
_ONE = {hold: 1 << _BITS * index for index, hold in enumerate(reversed(_HOLDS))}
_STATE = {one: hold for hold, one in _ONE.items()}
"""A block's references are one number, a field of _BITS for each kind of hold: the highest that is not empty is its
state. A single reference is the usual case."""


class CacheChange(NamedTuple):
    """One change of the prefix cache's content, in order: what the cluster's index follows."""

    is_stored: bool
    block_hash: BlockHash


class BlockPool:
    """All blocks of one pool. Not thread-safe: the engine's loop owns it."""

    def __init__(self, num_blocks: int, enable_prefix_cache: bool = True) -> None:
        assert num_blocks > 0, num_blocks
        self.num_blocks = num_blocks
        self._enable_prefix_cache = enable_prefix_cache
        self._free = [BlockId(block) for block in reversed(range(num_blocks))]
        self._evictable: OrderedDict[BlockId, None] = OrderedDict()
        self._references = [0] * num_blocks
        self._hash_of: dict[BlockId, BlockHash] = {}
        self._block_of: dict[BlockHash, BlockId] = {}
        self._counts = dict.fromkeys(BlockState, 0)
        self._counts[BlockState.FREE] = num_blocks
        self._changes: list[CacheChange] = []

    @property
    def num_available(self) -> int:
        """Blocks that allocate() can give: free ones and cached ones without a reference."""
        return len(self._free) + len(self._evictable)

    @property
    def counts(self) -> dict[BlockState, int]:
        """Blocks by state; a copy."""
        return dict(self._counts)

    def state(self, block: BlockId) -> BlockState:
        references = self._references[block]
        if references:
            return _STATE.get(references) or _highest(references)
        return BlockState.CACHED if block in self._hash_of else BlockState.FREE

    def num_references(self, block: BlockId) -> int:
        return sum(_num_held(self._references[block], hold) for hold in _HOLDS)

    @property
    def has_prefix_cache(self) -> bool:
        """Whether anything is ever found in it."""
        return self._enable_prefix_cache

    def lookup(self, chain: Sequence[BlockHash]) -> list[BlockId]:
        """The blocks of the longest cached prefix of `chain`. Takes no reference: acquire() them before anything
        else is allocated. Blocks still being written are never found, since they are registered afterwards."""
        found: list[BlockId] = []
        for block_hash in chain:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def find(self, hashes: Iterable[BlockHash]) -> dict[BlockHash, BlockId]:
        """Those of `hashes` that are cached, each with its block. Takes no reference, like lookup()."""
        known = self._block_of
        return {block_hash: known[block_hash] for block_hash in hashes if block_hash in known}

    def allocate(self, num_blocks: int, hold: BlockState = BlockState.OWNED) -> list[BlockId] | None:
        """Blocks with one reference each, or None when there is not room for all (then nothing changed). The least
        recently used cached blocks are evicted when free ones run out."""
        if num_blocks > self.num_available:
            return None
        num_free = min(num_blocks, len(self._free))
        blocks = self._free[len(self._free) - num_free :][::-1]
        del self._free[len(self._free) - num_free :]
        blocks += [self._evict() for _ in range(num_blocks - num_free)]
        one, references = _ONE[hold], self._references
        for block in blocks:
            references[block] = one
        self._counts[BlockState.FREE] -= num_blocks
        self._counts[hold] += num_blocks
        return blocks

    def acquire(self, blocks: Iterable[BlockId], hold: BlockState = BlockState.OWNED) -> None:
        """One more reference on each. Only blocks with content may be shared."""
        for block in blocks:
            assert self.state(block) in (BlockState.CACHED, BlockState.OWNED, BlockState.LEASED), self.state(
                block
            )
            self._evictable.pop(block, None)
            self._add(block, hold)

    def move(self, blocks: Iterable[BlockId], source: BlockState, target: BlockState) -> None:
        """Change the kind of one reference on each."""
        one, other, num_moved = _ONE[source], _ONE[target], 0
        references = self._references
        for block in blocks:
            if references[block] == one:
                references[block] = other
                num_moved += 1
            else:
                self._add(block, target)
                self._drop(block, source)
        self._counts[source] -= num_moved
        self._counts[target] += num_moved

    def release(self, blocks: Sequence[BlockId], hold: BlockState = BlockState.OWNED) -> None:
        """Drop one reference on each. Later blocks of a sequence become evictable before earlier ones, so that a
        prefix outlives its continuations."""
        one, references, hash_of = _ONE[hold], self._references, self._hash_of
        num_cached = num_freed = 0
        for block in reversed(blocks):
            if references[block] != one:
                self._drop(block, hold)
                continue
            references[block] = 0
            if block in hash_of:
                self._evictable[block] = None
                num_cached += 1
            else:
                self._free.append(block)
                num_freed += 1
        self._counts[hold] -= num_cached + num_freed
        self._counts[BlockState.CACHED] += num_cached
        self._counts[BlockState.FREE] += num_freed

    def register(self, block: BlockId, block_hash: BlockHash) -> None:
        """Make a full, wholly written block findable. A hash that is known keeps its first block; the duplicate
        stays private to its holder and is freed with it."""
        if not self._enable_prefix_cache or block_hash in self._block_of or block in self._hash_of:
            return
        before = self.state(block)
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        self._count(before, self.state(block))
        self._changes.append(CacheChange(True, block_hash))

    def clear_cache(self) -> None:
        """Forget every hash: cached blocks become free, held ones private to their holders."""
        for block in list(self._hash_of):
            was_evictable = block in self._evictable
            self._forget(block)
            if was_evictable:
                del self._evictable[block]
                self._free.append(block)

    def drain_changes(self) -> list[CacheChange]:
        """The cache's changes since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def cached_hashes(self) -> list[BlockHash]:
        """Every findable hash: a snapshot for an index that lost count."""
        return list(self._block_of)

    def check(self) -> None:
        """Assert every invariant, in O(num_blocks). For tests and idle moments."""
        actual = dict.fromkeys(BlockState, 0)
        for index in range(self.num_blocks):
            block = BlockId(index)
            actual[self.state(block)] += 1
            references = self._references[block]
            exclusive = sum(_num_held(references, hold) for hold in _HOLDS[:2])
            assert exclusive in (0, 1), (block, exclusive)
            assert not exclusive or self.num_references(block) == 1, block
        assert actual == self._counts, (actual, self._counts)
        assert len(self._free) == actual[BlockState.FREE] == len(set(self._free)), "free list"
        assert len(self._evictable) == actual[BlockState.CACHED], "evictable list"
        assert sum(actual.values()) == self.num_blocks, actual
        assert {block: hash_ for hash_, block in self._block_of.items()} == self._hash_of, "hash maps"

    def _evict(self) -> BlockId:
        block, _ = self._evictable.popitem(last=False)
        self._forget(block)
        return block

    def _forget(self, block: BlockId) -> None:
        before = self.state(block)
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        self._count(before, self.state(block))
        self._changes.append(CacheChange(False, block_hash))

    def _add(self, block: BlockId, hold: BlockState) -> None:
        before = self.state(block)
        self._references[block] += _ONE[hold]
        self._count(before, self.state(block))

    def _drop(self, block: BlockId, hold: BlockState) -> None:
        """One of several references."""
        before = self.state(block)
        assert _num_held(self._references[block], hold), f"block {block} is not {hold}"
        self._references[block] -= _ONE[hold]
        self._count(before, self.state(block))

    def _count(self, before: BlockState, after: BlockState) -> None:
        self._counts[before] -= 1
        self._counts[after] += 1


def _num_held(references: int, hold: BlockState) -> int:
    return references // _ONE[hold] % (1 << _BITS)


def _highest(references: int) -> BlockState:
    return next(hold for hold in _HOLDS if _num_held(references, hold))
