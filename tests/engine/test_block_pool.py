"""The pool against a model of it: whatever is done in whatever order, no held block is ever given out."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.ids import BlockHash
from engine.block_pool import BlockPool, BlockState, CacheChange

NUM_BLOCKS = 6
SHARED = (BlockState.OWNED, BlockState.LEASED)
EXCLUSIVE = (BlockState.IN_FLIGHT, BlockState.QUARANTINED)
HASHES = st.integers(0, 8).map(lambda number: hash_of(number))


def hash_of(number: int) -> BlockHash:
    return BlockHash(bytes([number]) * 16)


def cached(pool: BlockPool, *numbers: int) -> list[int]:
    """Blocks holding those hashes without a reference, the least recently used first."""
    blocks = []
    for number in numbers:
        (block,) = pool.allocate(1)
        pool.register(block, hash_of(number))
        pool.release([block])
        blocks.append(block)
    return blocks


class PoolMachine(RuleBasedStateMachine):
    """`held` maps a block to its references, `hashes` a findable hash to its block, `lru` the cached blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: dict[int, list[BlockState]] = {}
        self.hashes: dict[BlockHash, int] = {}
        self.lru: list[int] = []
        self.index: set[BlockHash] = set()

    def content_of(self, block: int) -> BlockHash | None:
        return next((block_hash for block_hash, holder in self.hashes.items() if holder == block), None)

    @rule(num_blocks=st.integers(0, NUM_BLOCKS + 1), hold=st.sampled_from([BlockState.OWNED, *EXCLUSIVE[:1]]))
    def allocate(self, num_blocks: int, hold: BlockState) -> None:
        num_free = NUM_BLOCKS - len(self.held) - len(self.lru)
        blocks = self.pool.allocate(num_blocks, hold)
        assert (blocks is None) == (num_blocks > num_free + len(self.lru))
        evicted = self.lru[: max(0, num_blocks - num_free)] if blocks is not None else []
        for block in evicted:
            self.lru.remove(block)
            del self.hashes[self.content_of(block)]
        assert set(evicted) <= set(blocks or ())
        for block in blocks or ():
            assert block not in self.held
            assert block not in self.lru
            self.held[block] = [hold]

    @precondition(lambda self: self.lru or self.held)
    @rule(data=st.data(), hold=st.sampled_from(SHARED))
    def acquire(self, data: st.DataObject, hold: BlockState) -> None:
        shareable = [block for block, holds in self.held.items() if holds[0] in SHARED]
        blocks = data.draw(
            st.lists(st.sampled_from(self.lru + shareable), max_size=3)
            if self.lru + shareable
            else st.just([])
        )
        self.pool.acquire(blocks, hold)
        for block in blocks:
            self.held.setdefault(block, []).append(hold)
            if block in self.lru:
                self.lru.remove(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        source = data.draw(st.sampled_from(self.held[block]))
        targets = SHARED + (EXCLUSIVE if len(self.held[block]) == 1 else ())
        target = data.draw(st.sampled_from(targets))
        self.pool.move([block], source, target)
        self.held[block].remove(source)
        self.held[block].append(target)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        hold = data.draw(st.sampled_from([*SHARED, *EXCLUSIVE]))
        holders = sorted(block for block, holds in self.held.items() if hold in holds)
        blocks = data.draw(st.lists(st.sampled_from(holders), unique=True) if holders else st.just([]))
        self.pool.release(blocks, hold)
        for block in reversed(blocks):
            self.held[block].remove(hold)
            if not self.held[block]:
                del self.held[block]
                if self.content_of(block) is not None:
                    self.lru.append(block)

    @precondition(lambda self: any(holds[0] in SHARED for holds in self.held.values()))
    @rule(data=st.data(), block_hash=HASHES)
    def register(self, data: st.DataObject, block_hash: BlockHash) -> None:
        owned = sorted(block for block, holds in self.held.items() if holds[0] in SHARED)
        block = data.draw(st.sampled_from(owned))
        self.pool.register(block, block_hash)
        if block_hash not in self.hashes and self.content_of(block) is None:
            self.hashes[block_hash] = block

    @rule(chain=st.lists(HASHES, max_size=4))
    def lookup(self, chain: list[BlockHash]) -> None:
        found = self.pool.lookup(chain)
        expected = [self.hashes.get(block_hash) for block_hash in chain]
        assert found == expected[: expected.index(None) if None in expected else None]

    @rule()
    def clear_cache(self) -> None:
        self.pool.clear_cache()
        self.hashes.clear()
        self.lru.clear()

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check()
        counts = self.pool.counts
        assert sum(counts.values()) == NUM_BLOCKS
        assert counts[BlockState.CACHED] == len(self.lru)
        assert self.pool.num_available == NUM_BLOCKS - len(self.held)
        for block, holds in self.held.items():
            assert self.pool.num_references(block) == len(holds)
            assert self.pool.state(block) in holds

    @invariant()
    def its_changes_lead_an_index_to_its_content(self) -> None:
        for is_stored, block_hash in self.pool.drain_changes():
            (self.index.add if is_stored else self.index.remove)(block_hash)
        assert self.index == set(self.hashes) == set(self.pool.cached_hashes())


PoolMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_the_least_recently_used_block_is_evicted_first_and_only_when_no_free_one_is_left():
    pool = BlockPool(4)
    oldest, middle, newest = cached(pool, 1, 2, 3)
    (free,) = pool.allocate(1)
    assert free not in (oldest, middle, newest)
    pool.acquire([oldest])
    pool.release([oldest])
    assert [pool.allocate(1)[0] for _ in range(3)] == [middle, newest, oldest]


def test_a_prefix_outlives_its_continuation():
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for number, block in enumerate(blocks):
        pool.register(block, hash_of(number))
    pool.release(blocks)
    pool.allocate(2)
    assert pool.lookup([hash_of(0), hash_of(1)]) == [blocks[0]]


def test_no_room_changes_nothing():
    pool = BlockPool(3)
    cached(pool, 1, 2)
    pool.drain_changes()
    assert pool.allocate(4) is None
    assert pool.counts[BlockState.CACHED] == 2
    assert pool.drain_changes() == []


def test_the_duplicate_of_a_hash_stays_private_to_its_holder():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.register(first, hash_of(1))
    pool.register(second, hash_of(1))
    assert pool.lookup([hash_of(1)]) == [first]
    pool.release([first])
    assert pool.allocate(3) is not None  # evicts the first; the duplicate is held and must not be touched
    assert pool.state(second) is BlockState.OWNED
    assert pool.lookup([hash_of(1)]) == []
    pool.release([second])
    assert pool.state(second) is BlockState.FREE
    pool.check()


def test_without_a_prefix_cache_nothing_is_ever_found():
    pool = BlockPool(2, enable_prefix_cache=False)
    (block,) = pool.allocate(1)
    pool.register(block, hash_of(1))
    assert pool.lookup([hash_of(1)]) == []
    pool.release([block])
    assert pool.counts[BlockState.FREE] == 2
    assert pool.drain_changes() == []


def test_changes_come_once_and_in_order():
    pool = BlockPool(1)
    cached(pool, 1)
    cached(pool, 2)
    changes = [CacheChange(True, hash_of(1)), CacheChange(False, hash_of(1)), CacheChange(True, hash_of(2))]
    assert pool.drain_changes() == changes
    assert pool.drain_changes() == []


@pytest.mark.parametrize("hold", EXCLUSIVE)
def test_a_block_that_is_being_written_cannot_be_shared(hold):
    pool = BlockPool(2)
    blocks = pool.allocate(1, hold)
    with pytest.raises(AssertionError, match=hold):
        pool.acquire(blocks)


def test_releasing_what_is_not_held_is_refused():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    with pytest.raises(AssertionError, match="is not leased"):
        pool.release(blocks, BlockState.LEASED)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="is not owned"):
        pool.release(blocks)
