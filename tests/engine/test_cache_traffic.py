"""Blocks fetched into a prefix cache and lent from it: whole or not at all, and every block accounted for."""

from collections.abc import Sequence as Seq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.clock import VirtualClock
from core.ids import BlockHash, BlockId, HandoffId, RequestId
from engine.block_pool import BlockPool, BlockState
from engine.cache_traffic import CacheTraffic
from engine.engine import Engine
from engine.hash_runner import HashRunner
from engine.messages import EndLoan, FetchBlocks, Fetched, Fetching, LendBlocks, Lent
from engine.scheduler import Scheduler, SchedulerLimits

FETCH, LOAN = (HandoffId(RequestId(name), 1) for name in ("fetch", "loan"))
CHAIN = [BlockHash(bytes([number]) * 16) for number in range(20)]


class Rig:
    def __init__(self, num_blocks: int = 8, enable_prefix_cache: bool = True) -> None:
        self.pool = BlockPool(num_blocks, enable_prefix_cache)
        self.taken_in: list[BlockId] = []
        self.published: list[BlockId] = []
        engine = Engine(
            Scheduler(SchedulerLimits(16, 64, 8, 400), self.pool, VirtualClock()),
            HashRunner(num_blocks, 16),
            self.taken_in.extend,
            self.published.extend,
        )
        self.traffic = CacheTraffic(engine)

    def cache(self, hashes: Seq[BlockHash]) -> list[BlockId]:
        blocks = self.pool.allocate(len(hashes))
        assert blocks is not None
        for block, block_hash in zip(blocks, hashes, strict=True):
            self.pool.register(block, block_hash)
        self.pool.release(blocks)
        return blocks

    def fetch(self, hashes: Seq[BlockHash], handoff_id: HandoffId = FETCH) -> Fetching:
        (answer,) = self.traffic.handle(FetchBlocks(handoff_id, list(hashes)))
        assert isinstance(answer, Fetching)
        return answer

    def lend(self, hashes: Seq[BlockHash]) -> Lent:
        (answer,) = self.traffic.handle(LendBlocks(LOAN, list(hashes)))
        assert isinstance(answer, Lent)
        return answer

    def held(self) -> int:
        self.pool.check()
        return self.pool.num_blocks - self.pool.num_available


def test_what_was_fetched_is_found_after_what_was_cached_and_not_before_it_is_whole():
    rig = Rig()
    cached = rig.cache(CHAIN[:2])
    fetching = rig.fetch(CHAIN[:5])
    assert (fetching.num_cached, len(fetching.block_ids)) == (2, 3)
    assert rig.pool.lookup(CHAIN) == cached
    rig.traffic.handle(Fetched(FETCH, is_whole=True))
    assert rig.pool.lookup(CHAIN) == [*cached, *fetching.block_ids]
    assert rig.taken_in == fetching.block_ids
    assert rig.held() == 0


def test_what_did_not_arrive_whole_is_free_again():
    rig = Rig()
    rig.fetch(CHAIN[:5])
    rig.traffic.handle(Fetched(FETCH, is_whole=False))
    assert rig.pool.lookup(CHAIN) == []
    assert rig.pool.counts[BlockState.FREE] == 8
    assert (rig.held(), rig.taken_in) == (0, [])


def test_a_fetch_never_evicts_what_it_continues_and_takes_no_more_than_there_is_room_for():
    rig = Rig(num_blocks=8)
    cached = rig.cache(CHAIN[:3])
    rig.cache([BlockHash(b"another prompt's")] * 1)
    fetching = rig.fetch(CHAIN)
    assert (fetching.num_cached, len(fetching.block_ids)) == (3, 5)
    rig.traffic.handle(Fetched(FETCH, is_whole=True))
    assert rig.pool.lookup(CHAIN) == [*cached, *fetching.block_ids]


def test_a_full_pool_fetches_nothing_and_a_pool_without_a_cache_neither():
    rig = Rig()
    blocks = rig.pool.allocate(8)
    assert rig.fetch(CHAIN).block_ids == []
    assert blocks is not None
    assert rig.held() == 8
    assert Rig(enable_prefix_cache=False).fetch(CHAIN) == Fetching(FETCH, 0, [])


def test_what_was_on_its_way_when_the_cache_was_cleared_does_not_join_it():
    rig = Rig()
    rig.fetch(CHAIN[:3])
    rig.pool.clear_cache()
    rig.traffic.clear()
    rig.traffic.handle(Fetched(FETCH, is_whole=True))
    assert rig.pool.lookup(CHAIN) == []
    assert rig.held() == 0
    rig.fetch(CHAIN[:3])
    rig.traffic.handle(Fetched(FETCH, is_whole=True))
    assert len(rig.pool.lookup(CHAIN)) == 3


def test_lent_blocks_stay_until_the_loan_ends():
    rig = Rig(num_blocks=4)
    blocks = rig.cache(CHAIN[:3])
    lent = rig.lend([CHAIN[2], CHAIN[9], CHAIN[0]])
    assert lent == Lent(LOAN, [CHAIN[2], CHAIN[0]], [blocks[2], blocks[0]])
    assert rig.published == [blocks[2], blocks[0]]
    assert rig.pool.allocate(3) is None
    assert rig.pool.lookup(CHAIN) == blocks
    rig.traffic.handle(EndLoan(LOAN))
    assert rig.held() == 0
    assert rig.pool.allocate(4) is not None


def test_a_repeated_or_unknown_command_changes_nothing():
    rig = Rig()
    rig.cache(CHAIN[:2])
    rig.fetch(CHAIN[:4])
    rig.lend(CHAIN[:2])
    before = rig.pool.counts
    assert rig.traffic.handle(FetchBlocks(FETCH, CHAIN[:8])) == []
    assert rig.traffic.handle(LendBlocks(LOAN, CHAIN[:1])) == []
    for command in (Fetched(LOAN, is_whole=True), EndLoan(FETCH)):
        assert rig.traffic.handle(command) == []
    assert rig.pool.counts == before


class Life(Rig):
    """Does what it is told, and knows what was written into each block: one found under a hash holds that."""

    def __init__(self) -> None:
        super().__init__(num_blocks=10)
        self.content: dict[BlockId, BlockHash | None] = {}
        self.owned: list[list[BlockId]] = []
        self.pending: dict[HandoffId, tuple[list[BlockHash], list[BlockId]]] = {}

    def fetch_some(self, handoff_id: HandoffId, size: int) -> None:
        for answer in self.traffic.handle(FetchBlocks(handoff_id, CHAIN[:size])):
            assert isinstance(answer, Fetching)
            self.pending[handoff_id] = (CHAIN[answer.num_cached :], answer.block_ids)
            self.content.update(dict.fromkeys(answer.block_ids))

    def arrive(self, handoff_id: HandoffId, _: int) -> None:
        hashes, blocks = self.pending.pop(handoff_id, ([], []))
        self.content.update(zip(blocks, hashes, strict=False))
        self.traffic.handle(Fetched(handoff_id, is_whole=True))

    def break_off(self, handoff_id: HandoffId, _: int) -> None:
        self.pending.pop(handoff_id, None)
        self.traffic.handle(Fetched(handoff_id, is_whole=False))

    def lend_some(self, handoff_id: HandoffId, size: int) -> None:
        for lent in self.traffic.handle(LendBlocks(handoff_id, CHAIN[size // 2 : size])):
            assert isinstance(lent, Lent)
            assert [self.content[block] for block in lent.block_ids] == lent.hashes

    def end_loan(self, handoff_id: HandoffId, _: int) -> None:
        self.traffic.handle(EndLoan(handoff_id))

    def take(self, _: HandoffId, size: int) -> None:
        blocks = self.pool.allocate(min(size, self.pool.num_available)) or []
        self.owned.append(blocks)
        self.content.update(dict.fromkeys(blocks))

    def give(self, _: HandoffId, size: int) -> None:
        if self.owned:
            self.pool.release(self.owned.pop(size % len(self.owned)))

    def clear(self, _: HandoffId, __: int) -> None:
        self.pool.clear_cache()
        self.traffic.clear()


STEPS = st.tuples(
    st.sampled_from([name for name in vars(Life) if not name.startswith("_")]),
    st.integers(0, 3),
    st.integers(1, 12),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_whatever_comes_in_whatever_order_the_blocks_add_up(steps: list[tuple[str, int, int]]):
    life = Life()
    ids = [HandoffId(RequestId(str(number)), 1) for number in range(4)]
    for what, number, size in steps:
        getattr(life, what)(ids[number], size)
        found = life.pool.lookup(CHAIN)
        assert [life.content[block] for block in found] == CHAIN[: len(found)]
        life.pool.check()
    for handoff_id in ids:
        life.break_off(handoff_id, 0)
        life.end_loan(handoff_id, 0)
    for blocks in life.owned:
        life.pool.release(blocks)
    assert life.held() == 0


@pytest.mark.parametrize("num_running", [0, 3])
def test_a_fetch_leaves_a_block_for_each_running_sequence(num_running: int):
    rig = Rig(num_blocks=8)
    rig.traffic._engine.scheduler.running = [object()] * num_running  # type: ignore[list-item]
    assert len(rig.fetch(CHAIN).block_ids) == 8 - num_running
