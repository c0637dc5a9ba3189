"""Who is let in, from what is known of both tiers' queues, and when the others may come again."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.clock import VirtualClock
from core.errors import Busy
from core.ids import RequestId
from core.load import Load
from gateway.routing.admission import ARRIVAL_S, Admission
from tests.gateway.routing.tables import EMPTY, SPEC, Known, known, table_of

FAST = replace(EMPTY, tokens_per_s=1000.0)


def admission(max_queue_s: float = 2.0) -> tuple[Admission, VirtualClock]:
    clock = VirtualClock()
    return Admission(max_queue_s, clock), clock


def prefill(num_queued: int, rate: float = 1000.0) -> Known:
    return known("p", replace(EMPTY, num_queued_tokens=num_queued, tokens_per_s=rate))


def check(
    made: Admission,
    prefill: list[Known],
    decode: list[Known],
    num_tokens: int = 10,
    waiting_prompts: Sequence[int] = (),
    num_live: int = 0,
) -> None:
    num_waiting_blocks = sum(SPEC.num_blocks_for(length + 1) for length in waiting_prompts)
    made.check(table_of(prefill), table_of(decode), num_tokens, num_waiting_blocks, num_live)


def refusal(made: Admission, prefill: list[Known], decode: list[Known], **state: object) -> Busy:
    with pytest.raises(Busy) as caught:
        check(made, prefill, decode, **state)
    return caught.value


def admits(made: Admission, prefill: list[Known], decode: list[Known], **state: object) -> bool:
    try:
        check(made, prefill, decode, **state)
    except Busy:
        return False
    return True


def test_a_prompt_that_would_wait_too_long_is_refused_with_the_time_that_is_missing():
    made, _ = admission()
    assert admits(made, [prefill(2000)], [known("d")])
    error = refusal(made, [prefill(5500)], [known("d")])
    assert error.retry_after_s == 4
    assert "prefill tier is behind by 5.5 s" in str(error)


def test_the_prefill_worker_that_is_free_first_counts():
    made, _ = admission()
    assert admits(made, [prefill(9000), prefill(100)], [known("d")])


def test_without_a_measured_rate_or_a_prefill_worker_nobody_is_refused():
    made, _ = admission()
    assert admits(made, [prefill(10**6, rate=0.0)], [known("d")])
    assert admits(made, [], [known("d")])


def test_without_a_prefill_tier_those_count_that_compute_any_prompt():
    made, _ = admission()
    busy = replace(EMPTY, num_queued_tokens=5000, tokens_per_s=1000.0)
    assert admits(made, [], [known("d", busy)])
    assert not admits(made, [], [known("d", busy, max_local_tokens=4096)])
    assert admits(made, [], [known("d", busy, max_local_tokens=4096), known("e", max_local_tokens=4096)])


def test_a_burst_counts_before_the_workers_know_of_it():
    made, clock = admission()
    for number in range(3):
        assert admits(made, [prefill(0)], [known("d")])
        made.arriving(RequestId(str(number)), 1000)
    assert not admits(made, [prefill(0)], [known("d")])
    made.arrived(RequestId("0"))
    assert admits(made, [prefill(0)], [known("d")])
    made.arriving(RequestId("never asked for"), 10**6)
    assert not admits(made, [prefill(0)], [known("d")])
    clock.advance(ARRIVAL_S)
    assert admits(made, [prefill(0)], [known("d")])


def test_requests_beyond_the_batch_places_wait_for_as_many_ends():
    made, clock = admission()
    decode = [known("d", FAST, max_batch=8)]
    for _ in range(20):
        clock.advance(0.5)
        made.ended()
    assert admits(made, [], decode, num_live=7)
    assert admits(made, [], decode, num_live=10)
    error = refusal(made, [], decode, num_live=15)
    assert "decode tier is behind by 3.8" in str(error)
    assert error.retry_after_s == 2


def test_what_other_gateways_run_counts_too():
    made, clock = admission()
    made.ended()
    clock.advance(1)
    full = [known("d", replace(FAST, num_running=8, num_waiting=3), max_batch=8)]
    assert not admits(made, [], full)


def test_those_whose_readers_take_nothing_are_before_nobody():
    made, _ = admission()
    full = replace(FAST, num_running=8, num_waiting=8)
    assert not admits(made, [], [known("d", full, max_batch=8)], num_live=16)
    suspended = known("d", replace(full, num_suspended=16), max_batch=8)
    assert admits(made, [], [suspended], num_live=16)


def test_while_no_end_was_seen_a_tier_may_be_filled_twice():
    made, _ = admission()
    decode = [known("d", FAST, max_batch=8)]
    assert admits(made, [], decode, num_live=15)
    assert not admits(made, [], decode, num_live=16)


def test_the_first_ends_of_a_burst_are_no_rate_yet():
    made, clock = admission()
    decode = [known("d", FAST, max_batch=8)]
    for _ in range(2):
        clock.advance(0.1)
        made.ended()
    assert admits(made, [], decode, num_live=15)
    clock.advance(1)
    assert not admits(made, [], decode, num_live=15)


def test_prompts_that_wait_for_blocks_count_as_what_they_need():
    made, clock = admission()
    made.ended()
    clock.advance(1)
    busy = [known("d", replace(FAST, num_free_blocks=24, num_running=4), max_batch=64)]
    assert admits(made, [], busy, waiting_prompts=[100, 100], num_live=6)
    assert not admits(made, [], busy, waiting_prompts=[300, 300, 300], num_live=7)


LOADS = st.builds(
    Load,
    num_blocks=st.just(64),
    num_free_blocks=st.integers(0, 64),
    num_queued_tokens=st.integers(0, 10**5),
    num_running=st.integers(0, 8),
    num_waiting=st.integers(0, 8),
    tokens_per_s=st.sampled_from([0.0, 1.0, 1000.0]),
)


@given(
    prefills=st.lists(LOADS, max_size=3),
    decodes=st.lists(LOADS, max_size=3),
    waiting=st.lists(st.integers(1, 3000), max_size=5),
    num_live=st.integers(0, 50),
    num_ends=st.integers(0, 5),
    more=st.integers(1, 10**5),
)
def test_more_work_never_opens_the_door(prefills, decodes, waiting, num_live, num_ends, more):
    made, clock = admission()
    for _ in range(num_ends):
        clock.advance(0.3)
        made.ended()
    ps = [known(f"p{index}", load) for index, load in enumerate(prefills)]
    ds = [known(f"d{index}", load) for index, load in enumerate(decodes)]
    before = admits(made, ps, ds, waiting_prompts=waiting, num_live=num_live)
    busier = [replace(c, load=replace(c.load, num_queued_tokens=c.load.num_queued_tokens + more)) for c in ps]
    assert admits(made, busier, ds, waiting_prompts=waiting, num_live=num_live) <= before
    assert admits(made, ps, ds, waiting_prompts=[*waiting, more], num_live=num_live + 1) <= before
    assert admits(made, ps, ds, num_tokens=10 + more, waiting_prompts=waiting, num_live=num_live) <= before
