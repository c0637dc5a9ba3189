"""Where a request goes, from what is known of the workers."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from core.ids import Epoch, WorkerId
from core.kv_spec import DType, KVSpec
from core.load import Load
from core.worker import Role, WorkerRecord
from gateway.routing.router import Candidate, choose_prefill, rank_decode

SPEC = KVSpec(2, 2, 16, 16, DType.FLOAT32, "m")
EMPTY = Load(num_blocks=64, num_free_blocks=64)


def candidate(
    name: str, load: Load = EMPTY, num_blocks: int = 64, max_batch: int = 8, **pending: int
) -> Candidate:
    epoch = Epoch(sum(name.encode()))
    record = WorkerRecord(
        WorkerId(name), epoch, Role.DECODE, "host:1", "m", SPEC, 4096, 300, num_blocks, max_batch
    )
    return Candidate(record, load, **pending)


def names(records: list[WorkerRecord]) -> list[str]:
    return [record.worker_id for record in records]


def prefill(candidates: list[Candidate], num_tokens: int = 100, **overlap: int) -> str | None:
    record = choose_prefill(candidates, num_tokens, _by_epoch(candidates, overlap))
    return record.worker_id if record is not None else None


def decode(
    candidates: list[Candidate], num_tokens: int = 100, max_len: int = 200, **overlap: int
) -> list[str]:
    return names(rank_decode(candidates, num_tokens, max_len, _by_epoch(candidates, overlap)))


def _by_epoch(candidates: list[Candidate], overlap: dict[str, int]) -> dict[Epoch, int]:
    epochs = {c.record.worker_id: c.record.epoch for c in candidates}
    return {epochs[WorkerId(name)]: count for name, count in overlap.items()}


def test_prefill_goes_where_the_fewest_tokens_are_ahead():
    busy = candidate("a", replace(EMPTY, num_queued_tokens=500))
    told = candidate("b", num_pending_tokens=400)
    free = candidate("c", replace(EMPTY, num_queued_tokens=10))
    assert prefill([busy, told, free]) == "c"
    assert prefill([busy, told]) == "b"


def test_what_was_sent_and_what_is_published_are_not_counted_twice():
    seen = candidate("a", replace(EMPTY, num_queued_tokens=100), num_pending_tokens=100)
    other = candidate("b", replace(EMPTY, num_queued_tokens=150))
    assert prefill([seen, other]) == "a"


def test_a_cached_prefix_is_worth_the_tokens_it_saves():
    far = candidate("a", replace(EMPTY, num_queued_tokens=50))
    near = candidate("b")
    assert prefill([far, near], 100, a=4) == "a"
    assert prefill([far, near], 100, a=3) == "b"
    assert prefill([near, far], 16, a=1000) == "b", "no more than the prompt can be saved"


def test_ties_are_broken_by_name_alone():
    pair = [candidate("b"), candidate("a")]
    assert prefill(pair) == prefill(pair[::-1]) == "a"
    assert decode(pair) == decode(pair[::-1]) == ["a", "b"]


def test_a_pool_that_is_too_small_is_left_out():
    small, large = candidate("a", num_blocks=4), candidate("b", num_blocks=64)
    assert prefill([small, large], 65) == "b"
    assert prefill([small], 65) is None
    assert prefill([small], 64) == "a"
    assert prefill([]) is None


def test_a_decode_pool_must_hold_the_output_too():
    small, large = candidate("a", num_blocks=8), candidate("b", num_blocks=64)
    assert decode([small, large], 100, 128) == ["a", "b"]
    assert decode([small, large], 100, 129) == ["b"]
    assert decode([small], 100, 129) == []


def test_decode_prefers_the_emptier_batch_relative_to_its_size():
    half = candidate("a", replace(EMPTY, num_running=4))
    large = candidate("b", replace(EMPTY, num_running=5), max_batch=32)
    assert decode([half, large]) == ["b", "a"]


def test_decode_weighs_a_cached_prefix_against_the_batch():
    holder = candidate("a", replace(EMPTY, num_running=3))
    empty = candidate("b")
    assert decode([holder, empty], 96, 200, a=6) == ["a", "b"]
    assert decode([holder, empty], 96, 200, a=1) == ["b", "a"]


def test_full_ones_come_last_but_are_kept():
    batch = candidate("a", replace(EMPTY, num_running=6, num_waiting=2))
    pool = candidate("b", replace(EMPTY, num_free_blocks=6))
    sent = candidate("c", num_pending=8)
    room = candidate("d", replace(EMPTY, num_running=7))
    ranked = decode([batch, pool, sent, room], 100)
    assert ranked[0] == "d"
    assert sorted(ranked) == ["a", "b", "c", "d"]


LOADS = st.builds(
    Load,
    num_blocks=st.just(64),
    num_free_blocks=st.integers(0, 64),
    num_queued_tokens=st.integers(0, 1000),
    num_running=st.integers(0, 8),
    num_waiting=st.integers(0, 8),
)
CANDIDATES = st.lists(
    st.tuples(LOADS, st.integers(1, 64), st.integers(0, 500), st.integers(0, 9)), max_size=6
).map(
    lambda rows: [
        candidate(f"w{index}", load, blocks, num_pending_tokens=tokens, num_pending=pending)
        for index, (load, blocks, tokens, pending) in enumerate(rows)
    ]
)


@given(CANDIDATES, st.integers(1, 600), st.integers(0, 400), st.data())
def test_decisions_depend_on_the_workers_and_not_on_their_order(candidates, num_tokens, num_more, data):
    shuffled = data.draw(st.permutations(candidates))
    overlap = {c.record.epoch: data.draw(st.integers(0, 40)) for c in candidates}
    max_len = num_tokens + num_more
    assert choose_prefill(candidates, num_tokens, overlap) == choose_prefill(shuffled, num_tokens, overlap)
    ranked = rank_decode(candidates, num_tokens, max_len, overlap)
    assert ranked == rank_decode(shuffled, num_tokens, max_len, overlap)
    fitting = [c.record for c in candidates if SPEC.num_blocks_for(max_len) <= c.record.num_blocks]
    assert sorted(names(ranked)) == sorted(names(fitting))
