"""Whose grammar is slow to say what may follow, and when the engine's time may go into that. No torch; takes a clock.

Masks of usual grammars take a tenth of a millisecond and go on as all others. The slow ones of a step take STEP_S
together, or are one; while others have work, SHARE of the time at most. They take turns, so each goes on.
"""

from collections.abc import Sequence as Seq
from itertools import count

from core.clock import Clock
from engine.guided import Guide
from engine.sequence import Sequence

SLOW_S = 0.002
STEP_S = 0.02
SHARE = 0.25


class MaskShare:
    """Of one engine."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._left_s = STEP_S
        self._counted_until_s = clock()
        self._turns = count(1)

    def held_back(self, sequences: Seq[Sequence], has_others: bool) -> list[Sequence]:
        """Those of `sequences`, which could have a token in the next step, that must wait for a later one, the next
        in turn first. `has_others`: there is work besides these."""
        slow = [(guide, sequence) for sequence in sequences if (guide := _slow(sequence))]
        if not slow:
            return []
        slow.sort(key=lambda pair: pair[0].turn)
        self._refill()
        has_others = has_others or len(slow) < len(sequences)
        left_s = min(self._left_s, STEP_S) if has_others else STEP_S
        num_served = 0
        for guide, _ in slow:
            if left_s <= 0 or (num_served and guide.mask_s > left_s):
                break
            left_s -= guide.mask_s
            guide.turn = next(self._turns)
            num_served += 1
        if has_others:
            self._left_s = left_s
        return [sequence for _, sequence in slow[num_served:]]

    def _refill(self) -> None:
        now_s = self._clock()
        self._left_s = min(self._left_s + SHARE * (now_s - self._counted_until_s), STEP_S)
        self._counted_until_s = now_s


def _slow(sequence: Sequence) -> Guide | None:
    guide = sequence.guide
    return guide if guide is not None and guide.mask_s > SLOW_S else None
