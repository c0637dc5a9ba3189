"""Stages never overlap and add up, whatever happened in whatever order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.clock import VirtualClock
from gateway.timing import STAGES, Mark, StageClock

STEPS = st.one_of(
    st.tuples(st.sampled_from(list(Mark)[1:-1]), st.floats(0, 10), st.floats(-1, 5)),
    st.tuples(st.just(Mark.ENDED), st.floats(0, 10), st.just(0.0)),
)


@given(st.lists(STEPS, max_size=12))
def test_stages_are_never_negative_and_add_up_to_the_total(steps):
    clock = VirtualClock(100.0)
    stages = StageClock(clock)
    for mark, duration_s, ago_s in steps:
        clock.advance(duration_s)
        stages.mark(mark, ago_s)
    durations = stages.durations()
    assert set(durations) == {*STAGES, "total_s", "time_to_first_token_s"}
    assert all(durations[stage] >= 0 for stage in STAGES)
    assert sum(durations[stage] for stage in STAGES) == pytest.approx(durations["total_s"])
    assert stages.durations() == durations


@given(st.permutations([mark for mark in Mark if mark not in (Mark.ARRIVED, Mark.ENDED)]), st.integers(0, 7))
def test_with_any_marks_in_any_order_the_first_token_lies_within_the_total(marks, count):
    clock = VirtualClock()
    stages = StageClock(clock)
    for mark in marks[:count]:
        clock.advance(1.0)
        stages.mark(mark)
    clock.advance(1.0)
    durations = stages.durations()
    assert durations["total_s"] == count + 1
    assert 0 <= durations["time_to_first_token_s"] <= durations["total_s"]


def marked(*moments: tuple[Mark, float]) -> dict[str, float]:
    """Durations after the marks at those times, zero ones left out."""
    clock = VirtualClock()
    stages = StageClock(clock)
    for mark, at_s in sorted(moments, key=lambda moment: moment[1]):
        clock.advance(at_s - clock())
        stages.mark(mark)
    return {name: value for name, value in stages.durations().items() if value}


def test_a_handoff_in_the_usual_order():
    moments = list(zip(Mark, range(9), strict=True))
    every_stage = dict.fromkeys(STAGES, 1.0)
    assert marked(*moments) == {**every_stage, "total_s": 8.0, "time_to_first_token_s": 4.0}


def test_a_request_arrives_when_it_is_said_to_have_and_its_spans_are_its_stages():
    clock = VirtualClock(100.0)
    stages = StageClock(clock, arrived_s=99.0)
    stages.mark(Mark.ADMITTED)
    clock.advance(2)
    assert stages.durations()["total_s"] == 3.0, "it has not ended: as if it did now"
    stages.mark(Mark.ENDED)
    clock.advance(5)
    assert [span for span in stages.spans() if span.begin_s < span.end_s] == [
        ("prepare_s", 99.0, 100.0),
        ("queue_s", 100.0, 102.0),
    ]
    assert stages.durations()["total_s"] == 3.0


def test_a_grant_before_the_first_token_leaves_no_wait_for_it():
    durations = marked(
        (Mark.STARTED, 1), (Mark.GRANTED, 2), (Mark.FIRST_TOKEN, 5), (Mark.VERIFIED, 6), (Mark.ENDED, 6)
    )
    assert durations == {
        "queue_s": 1.0,
        "prefill_s": 4.0,
        "transfer_s": 1.0,
        "total_s": 6.0,
        "time_to_first_token_s": 5.0,
    }


def test_a_first_token_that_ends_the_request():
    assert marked((Mark.STARTED, 1), (Mark.FIRST_TOKEN, 3), (Mark.ENDED, 3)) == {
        "queue_s": 1.0,
        "prefill_s": 2.0,
        "total_s": 3.0,
        "time_to_first_token_s": 3.0,
    }


def test_a_request_that_never_started_only_queued():
    assert marked((Mark.ADMITTED, 0), (Mark.ENDED, 4)) == {
        "queue_s": 4.0,
        "total_s": 4.0,
        "time_to_first_token_s": 4.0,
    }


def test_the_time_to_an_end_is_that_of_the_stage_it_came_in():
    assert marked((Mark.STARTED, 1), (Mark.FIRST_TOKEN, 2), (Mark.GRANTED, 3), (Mark.ENDED, 7)) == {
        "queue_s": 1.0,
        "prefill_s": 1.0,
        "grant_wait_s": 1.0,
        "transfer_s": 4.0,
        "total_s": 7.0,
        "time_to_first_token_s": 3.0,
    }


def test_a_mark_counts_once():
    clock = VirtualClock()
    stages = StageClock(clock)
    clock.advance(1)
    stages.mark(Mark.STARTED)
    clock.advance(1)
    stages.mark(Mark.STARTED)
    assert stages.since(Mark.STARTED) == 1.0
    assert stages.has(Mark.STARTED)
    assert not stages.has(Mark.GRANTED)
