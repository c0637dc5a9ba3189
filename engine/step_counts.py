"""What an engine has done since its start, in plain numbers: a step adds to them in microseconds."""

from bisect import bisect_left
from collections.abc import Sequence as Seq

from core.load import BATCH_BOUNDS, STEP_BOUNDS_S, Counts
from engine.scheduler import Work


class StepCounts:
    """Owned by one engine."""

    def __init__(self) -> None:
        self._steps_by_time = [0] * (len(STEP_BOUNDS_S) + 1)
        self._steps_by_batch = [0] * (len(BATCH_BOUNDS) + 1)
        self._steps_s = 0.0
        self._num_batched = 0
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._num_recomputed_tokens = 0

    def note(self, work: Seq[Work], step_s: float) -> None:
        """A step that has computed `work`, which is committed."""
        self._steps_by_time[bisect_left(STEP_BOUNDS_S, step_s)] += 1
        self._steps_by_batch[bisect_left(BATCH_BOUNDS, len(work))] += 1
        self._steps_s += step_s
        self._num_batched += len(work)
        for sequence, num_tokens in work:
            begin = sequence.num_computed - num_tokens
            if begin >= sequence.num_prompt_tokens and begin >= sequence.num_lost:
                self._num_output_tokens += num_tokens
            else:
                self._note_prompt(begin, sequence.num_computed, sequence.num_prompt_tokens, sequence.num_lost)

    def _note_prompt(self, begin: int, end: int, num_prompt_tokens: int, num_lost: int) -> None:
        """Tokens from `begin` to `end`, of which those before `num_lost` were computed once before."""
        fresh = min(max(begin, num_lost), end)
        num_prompt = max(min(end, num_prompt_tokens) - fresh, 0)
        self._num_recomputed_tokens += fresh - begin
        self._num_prompt_tokens += num_prompt
        self._num_output_tokens += end - fresh - num_prompt

    def read(self, num_preemptions: int) -> Counts:
        """As they are now, with the scheduler's count of preemptions."""
        return Counts(
            tuple(self._steps_by_time),
            self._steps_s,
            tuple(self._steps_by_batch),
            self._num_batched,
            self._num_prompt_tokens,
            self._num_output_tokens,
            self._num_recomputed_tokens,
            num_preemptions,
        )
