"""Tombstones, the states of a handoff, and the virtual clock that both are tested under."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.clock import VirtualClock
from core.handoff import Handoff, HandoffState, can_follow
from core.tombstones import Tombstones

LIVE = [state for state in HandoffState if state not in ("finished", "aborted", "failed")]
SHORTCUTS = {
    (HandoffState.PENDING, HandoffState.DECODING),
    (HandoffState.GRANTED, HandoffState.SEALED),
    (HandoffState.SEALED, HandoffState.FINISHED),
}
FORWARD = {*itertools.pairwise([*LIVE, HandoffState.FINISHED]), *SHORTCUTS}


@pytest.mark.parametrize(("state", "following"), list(itertools.product(HandoffState, HandoffState)))
def test_a_handoff_goes_forward_or_ends_and_nothing_follows_an_end(state, following):
    may_end = state in LIVE and following in (HandoffState.ABORTED, HandoffState.FAILED)
    assert can_follow(state, following) == (may_end or (state, following) in FORWARD)
    assert state.is_terminal == (state not in LIVE)


def test_an_illegal_step_is_refused_with_both_states_named():
    handoff = Handoff()
    handoff.advance(HandoffState.GRANTED)
    with pytest.raises(AssertionError, match="granted cannot become finished"):
        handoff.advance(HandoffState.FINISHED)
    assert handoff.state is HandoffState.GRANTED


def test_an_end_is_final_and_may_be_told_again():
    handoff = Handoff()
    handoff.end(HandoffState.ABORTED)
    handoff.end(HandoffState.FAILED)
    assert handoff.state is HandoffState.ABORTED


@given(
    st.lists(
        st.one_of(st.tuples(st.just("add"), st.integers(0, 5)), st.tuples(st.just("wait"), st.integers(0, 6)))
    ),
    st.integers(1, 4),
)
def test_an_id_is_remembered_for_its_lifetime_unless_too_many_came_after(steps, max_entries):
    clock = VirtualClock()
    tombstones = Tombstones(10.0, max_entries, clock)
    added: dict[int, float] = {}
    for kind, value in steps:
        if kind == "wait":
            clock.advance(value)
        else:
            tombstones.add(value)
            added.pop(value, None)
            added[value] = clock()
    alive = [key for key, at_s in added.items() if at_s + 10.0 > clock()][-max_entries:]
    assert [key for key in added if key in tombstones] == alive
    assert len(tombstones) == len(alive)


def test_a_virtual_clock_moves_only_forward_and_only_when_told():
    clock = VirtualClock(5.0)
    assert clock() == clock() == 5.0
    clock.advance(0.5)
    assert clock() == 5.5
    with pytest.raises(AssertionError):
        clock.advance(-1)
