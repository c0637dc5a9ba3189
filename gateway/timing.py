"""Where one request's time goes, by the gateway's clock. Stages never overlap, so they add up to the total.

    arrival ─queue─ started ─prefill─ first token ─grant wait─ granted ─transfer─ verified ─decode queue─┐
                                                                  end ─decode─ second token ─first step──┘

A mark that comes earlier than the one before it (a grant before the first token) makes its stage empty.
"""

from dataclasses import dataclass
from enum import IntEnum

from core.clock import Clock, loop_time


class Mark(IntEnum):
    """Moments in order."""

    ARRIVED = 0
    STARTED = 1
    FIRST_TOKEN = 2
    GRANTED = 3
    VERIFIED = 4
    STEP_BEGAN = 5
    SECOND_TOKEN = 6
    ENDED = 7


_LATER = tuple(Mark)[1:]
STAGES = ("queue_s", "prefill_s", "grant_wait_s", "transfer_s", "decode_queue_s", "first_step_s", "decode_s")


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of a request's stages and what served it. `connector` and `decode_worker_id` are empty when the
    first token ended the request; `causes` says what did not go the usual way (retries, local prefill)."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    grant_wait_s: float = 0.0
    transfer_s: float = 0.0
    decode_queue_s: float = 0.0
    first_step_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0
    time_to_first_token_s: float = 0.0
    prefill_worker_id: str = ""
    decode_worker_id: str = ""
    connector: str = ""
    kv_bytes: int = 0
    num_attempts: int = 1
    num_preemptions: int = 0
    causes: tuple[str, ...] = ()


class StageClock:
    """The marks of one request. A mark counts once; later ones of the same kind (another attempt) are ignored."""

    def __init__(self, clock: Clock = loop_time) -> None:
        self._clock = clock
        self._marks: dict[Mark, float] = {Mark.ARRIVED: clock()}

    def mark(self, mark: Mark, ago_s: float = 0.0) -> None:
        self._marks.setdefault(mark, self._clock() - ago_s)

    def has(self, mark: Mark) -> bool:
        return mark in self._marks

    def since(self, mark: Mark) -> float:
        return self._clock() - self._marks[mark]

    @property
    def reached(self) -> Mark:
        """The last mark that none before is missing to."""
        reached = Mark.ARRIVED
        for mark in _LATER:
            if mark not in self._marks:
                break
            reached = mark
        return reached

    @property
    def stage(self) -> str:
        """That which it is in, or ended in."""
        return STAGES[min(self.reached, len(STAGES) - 1)]

    def durations(self) -> dict[str, float]:
        """Seconds by stage name, with total_s and time_to_first_token_s. Marks the end if that is not done; the stage
        that it came in is the last one."""
        self.mark(Mark.ENDED)
        last = max(mark for mark in self._marks if mark is not Mark.ENDED)
        return self._durations(self._marks[Mark.ENDED], last)

    def so_far(self) -> dict[str, float]:
        """The same of one that may go on: the stage that it is in lasts until now."""
        return self._durations(self._marks.get(Mark.ENDED, self._clock()), self.reached)

    def _durations(self, end_s: float, last: Mark) -> dict[str, float]:
        reached_s = start_s = self._marks[Mark.ARRIVED]
        durations: dict[str, float] = {}
        for stage, mark in zip(STAGES, _LATER, strict=True):
            marked_s = end_s if mark > last else self._marks.get(mark, reached_s)
            at_s = min(max(marked_s, reached_s), end_s)
            durations[stage] = at_s - reached_s
            reached_s = at_s
        durations["total_s"] = end_s - start_s
        seen_s = max(self._marks.get(Mark.FIRST_TOKEN, end_s), self._marks.get(Mark.GRANTED, start_s))
        durations["time_to_first_token_s"] = min(seen_s, end_s) - start_s
        return durations
