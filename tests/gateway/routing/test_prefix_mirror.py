"""The mirror against sets of hashes, whatever happens in whatever order."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from core.ids import BlockHash, Epoch
from gateway.routing.prefix_mirror import Expectation, PrefixMirror

CHAIN = [BlockHash(bytes([17 * number]) * 16) for number in range(6)]
EPOCHS = st.integers(1, 4)
NUMBERS = st.sets(st.integers(0, 5))
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["store", "discard", "replace", "expect"]), EPOCHS, NUMBERS),
        st.tuples(st.sampled_from(["add", "remove", "end"]), EPOCHS, st.just(set())),
        st.tuples(st.just("correct"), EPOCHS, st.tuples(st.integers(0, 6), st.integers(0, 6))),
    ),
    max_size=25,
)


def run(sweep) -> None:
    for _ in sweep or ():
        pass


class Both:
    """A mirror, and sets that should say the same: holders and their blocks, told of and expected."""

    def __init__(self) -> None:
        self.mirror = PrefixMirror()
        self.held: dict[int, set[int]] = {}
        self.expected: dict[int, list[tuple[Expectation, set[int]]]] = {}

    def depths(self) -> dict[int, int]:
        found = {}
        for epoch, held in self.held.items():
            known = held.union(*(numbers for _, numbers in self.expected.get(epoch, [])))
            if depth := _depth(known):
                found[epoch] = depth
        return found

    def add(self, epoch: Epoch, _: object) -> None:
        self.mirror.add(epoch)
        self.held.setdefault(epoch, set())

    def remove(self, epoch: Epoch, _: object) -> None:
        run(self.mirror.remove(epoch))
        self.held.pop(epoch, None)

    def store(self, epoch: Epoch, numbers: set[int]) -> None:
        self.mirror.store(epoch, hashes_of(numbers))
        if epoch in self.held:
            self.held[epoch] |= numbers

    def discard(self, epoch: Epoch, numbers: set[int]) -> None:
        self.mirror.discard(epoch, hashes_of(numbers))
        if epoch in self.held:
            self.held[epoch] -= numbers

    def replace(self, epoch: Epoch, numbers: set[int]) -> None:
        run(self.mirror.replace(epoch, hashes_of(numbers)))
        if epoch in self.held:
            self.held[epoch] = set(numbers)

    def correct(self, epoch: Epoch, numbers: tuple[int, int]) -> None:
        num_believed, num_held = numbers
        self.mirror.correct(epoch, CHAIN, num_believed, num_held)
        if epoch in self.held:
            held = self.held[epoch] - set(range(num_held, num_believed))
            self.held[epoch] = held | set(range(num_believed, num_held))

    def expect(self, epoch: Epoch, numbers: set[int]) -> None:
        made = self.mirror.expect(epoch, hashes_of(numbers))
        lacking = {CHAIN.index(block_hash) for block_hash in made.hashes}
        self.expected.setdefault(epoch, []).append((made, lacking))

    def end(self, epoch: Epoch, _: object) -> None:
        if self.expected.get(epoch):
            self.mirror.end(self.expected[epoch].pop()[0])


def hashes_of(numbers: set[int]) -> list[BlockHash]:
    return [CHAIN[number] for number in sorted(numbers)]


def _depth(numbers: set[int]) -> int:
    return next((number for number in range(6) if number not in numbers), 6)


@settings(max_examples=300, deadline=None)
@given(changes=CHANGES)
def test_it_says_what_sets_would(changes):
    both = Both()
    for kind, number, what in changes:
        getattr(both, kind)(Epoch(number), what)
        assert both.mirror.longest_prefix(CHAIN) == both.depths()
    for epoch in list(both.held):
        both.remove(Epoch(epoch), None)
    for epoch, left in both.expected.items():
        while left:
            both.end(Epoch(epoch), None)
    assert both.mirror.num_blocks == 0
    assert not both.mirror._expected


def test_who_comes_while_another_is_swept_out_gets_nothing_of_it():
    mirror = PrefixMirror()
    mirror.add(Epoch(1))
    mirror.store(Epoch(1), CHAIN)
    sweep = mirror.remove(Epoch(1))
    next(sweep)
    mirror.add(Epoch(2))
    assert mirror.longest_prefix(CHAIN) == {}
    run(sweep)
    mirror.add(Epoch(3))
    assert mirror.longest_prefix(CHAIN) == {}
    assert mirror.num_blocks == 0


def test_an_expectation_ends_once_whatever_became_of_its_worker():
    mirror = PrefixMirror()
    mirror.add(Epoch(1))
    first, second = (mirror.expect(Epoch(1), CHAIN) for _ in range(2))
    mirror.end(first)
    mirror.end(first)
    assert mirror.longest_prefix(CHAIN) == {1: 6}
    run(mirror.remove(Epoch(1)))
    mirror.end(second)
    assert not mirror._expected


def test_a_full_mirror_forgets_what_it_heard_of_first():
    mirror = PrefixMirror(max_blocks=1 << 10)
    mirror.add(Epoch(1))
    hashes = [BlockHash(number.to_bytes(2, "little") * 8) for number in range(1 << 12)]
    mirror.store(Epoch(1), hashes)
    assert mirror.num_blocks == 1 << 10
    assert mirror.num_forgotten == 3 << 10
    assert mirror.longest_prefix(hashes[-4:]) == {1: 4}
    assert mirror.longest_prefix(hashes[:4]) == {}


def test_it_is_put_right_but_for_what_was_told_since():
    mirror = PrefixMirror()
    mirror.add(Epoch(1))
    mirror.store(Epoch(1), CHAIN[:4])
    mirror.correct(Epoch(1), CHAIN, num_believed=4, num_held=2)
    assert mirror.longest_prefix(CHAIN) == {1: 2}
    mirror.correct(Epoch(1), CHAIN, num_believed=2, num_held=5)
    assert mirror.longest_prefix(CHAIN) == {1: 5}
    mirror.correct(Epoch(1), CHAIN, num_believed=0, num_held=0)
    assert mirror.longest_prefix(CHAIN) == {1: 5}, "a prompt nobody knew has been computed meanwhile"


def test_a_long_chain_among_many_workers_costs_little_more_than_among_one():
    """What a lookup costs grows with the chain, not with how many hold it."""
    hashes = [BlockHash((7919 * number).to_bytes(4, "little") * 4) for number in range(500)]

    def cost_s(num_workers: int) -> float:
        mirror = PrefixMirror()
        for number in range(num_workers):
            mirror.add(Epoch(number + 1))
            mirror.store(Epoch(number + 1), hashes[: 500 - number % 7])
        times = []
        for _ in range(20):
            began_s = time.perf_counter()
            mirror.longest_prefix(hashes)
            times.append(time.perf_counter() - began_s)
        return min(times)

    assert cost_s(512) < 20 * cost_s(1)
