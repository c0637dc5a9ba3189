"""Grammars whose masks are slow: they take turns, and leave most of the time to others."""

from concurrent.futures import Future

import pytest

from core.clock import VirtualClock
from core.ids import HandoffId, RequestId
from core.sampling import SamplingParams
from engine.guided import Guide
from engine.mask_share import SHARE, SLOW_S, STEP_S, MaskShare
from engine.sequence import Sequence

STEP_WITHOUT_MASKS_S = 0.005


def make_sequence(number: int, mask_s: float | None) -> Sequence:
    """None: without a grammar."""
    guide = None if mask_s is None else Guide(Future())
    if guide is not None:
        guide.mask_s = mask_s or 0.0
    return Sequence(HandoffId(RequestId(str(number)), 1), [1], 1, SamplingParams(9), "model", guide=guide)


def run(sequences: list[Sequence], num_steps: int, has_others: bool = False) -> tuple[list[int], list[float]]:
    """How often each sequence was served, and what each step's masks took."""
    clock = VirtualClock()
    share = MaskShare(clock)
    served, masks_s = [0] * len(sequences), []
    for _ in range(num_steps):
        held = {sequence.id for sequence in share.held_back(sequences, has_others)}
        now = [at for at, sequence in enumerate(sequences) if sequence.id not in held]
        for at in now:
            served[at] += 1
        masks_s.append(sum(sequences[at].guide.mask_s for at in now if sequences[at].guide))
        clock.advance(STEP_WITHOUT_MASKS_S + masks_s[-1])
    return served, masks_s


@pytest.mark.parametrize("has_others", [True, False], ids=["a prompt", "a stream"])
def test_slow_ones_take_turns_and_a_share_of_the_time(has_others):
    others = [] if has_others else [make_sequence(99, None)]
    slow = [make_sequence(number, 0.05) for number in range(16)]
    served, masks_s = run([*others, *slow], 2000, has_others)
    elapsed_s = 2000 * STEP_WITHOUT_MASKS_S + sum(masks_s)
    assert sum(masks_s) == pytest.approx(SHARE * elapsed_s, rel=0.1)
    assert max(masks_s) == 0.05, "never two in one step"
    assert max(served[len(others) :]) - min(served[len(others) :]) <= 1
    assert served[: len(others)] == [2000] * len(others)


def test_alone_they_wait_for_nothing_but_their_turn():
    served, masks_s = run([make_sequence(number, 0.05) for number in range(4)], 100)
    assert served == [25] * 4
    assert masks_s == [0.05] * 100


def test_several_share_a_step_while_that_is_short():
    served, masks_s = run([make_sequence(number, 0.3 * STEP_S) for number in range(8)], 100)
    assert max(masks_s) == pytest.approx(0.9 * STEP_S)
    assert max(served) - min(served) <= 1 and sum(served) == 300


def test_usual_ones_are_never_held_back():
    usual = [make_sequence(number, mask_s) for number, mask_s in enumerate([None, 0.0, SLOW_S])]
    served, _ = run([*usual, make_sequence(9, 0.05)], 50, has_others=True)
    assert served[:3] == [50] * 3
