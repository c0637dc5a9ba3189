"""Where one request's time goes, by the gateway's clock. Stages never overlap, so they add up to the total.

    arrival ─prepare─ admitted ─queue─ started ─prefill─ first token ─grant wait─ granted ─transfer─ verified ─┐
                                            end ─decode─ second token ─first step─ step began ─decode queue────┘

A mark that comes earlier than the one before it (a grant before the first token) makes its stage empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from core.clock import Clock, loop_time


class Mark(IntEnum):
    """Moments in order."""

    ARRIVED = 0
    ADMITTED = 1
    STARTED = 2
    FIRST_TOKEN = 3
    GRANTED = 4
    VERIFIED = 5
    STEP_BEGAN = 6
    SECOND_TOKEN = 7
    ENDED = 8


_LATER = tuple(Mark)[1:]
STAGES = (
    "prepare_s",
    "queue_s",
    "prefill_s",
    "grant_wait_s",
    "transfer_s",
    "decode_queue_s",
    "first_step_s",
    "decode_s",
)


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of a request's stages and what served it. `connector` and `decode_worker_id` are empty when the
    first token ended the request; `causes` says what did not go the usual way (retries, local prefill)."""

    prepare_s: float = 0.0
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


class StageSpan(NamedTuple):
    """One stage, as the clock read at its ends."""

    stage: str
    begin_s: float
    end_s: float


class StageClock:
    """The marks of one request. A mark counts once; later ones of the same kind (another attempt) are ignored."""

    def __init__(self, clock: Clock = loop_time, arrived_s: float | None = None) -> None:
        """It arrives now, unless `clock` said `arrived_s` then."""
        self._clock = clock
        self._marks: dict[Mark, float] = {Mark.ARRIVED: clock() if arrived_s is None else arrived_s}

    def now(self) -> float:
        return self._clock()

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

    def spans(self) -> Sequence[StageSpan]:
        """Every stage from the arrival to the end, which is now unless it was marked; the stage that it came in is
        the last one that is not empty."""
        return self._spans(max(mark for mark in self._marks if mark is not Mark.ENDED))

    def durations(self) -> dict[str, float]:
        """Seconds by stage name, with total_s and time_to_first_token_s."""
        return self._durations(self.spans())

    def so_far(self) -> dict[str, float]:
        """The same of one that may go on: the stage that it is in lasts until now."""
        return self._durations(self._spans(self.reached))

    def _spans(self, last: Mark) -> Sequence[StageSpan]:
        """What comes after `last` lies at the end."""
        end_s = self._marks.get(Mark.ENDED, self._clock())
        reached_s = self._marks[Mark.ARRIVED]
        spans = []
        for stage, mark in zip(STAGES, _LATER, strict=True):
            marked_s = end_s if mark > last else self._marks.get(mark, reached_s)
            at_s = min(max(marked_s, reached_s), end_s)
            spans.append(StageSpan(stage, reached_s, at_s))
            reached_s = at_s
        return spans

    def _durations(self, spans: Sequence[StageSpan]) -> dict[str, float]:
        start_s, end_s = spans[0].begin_s, spans[-1].end_s
        durations = {span.stage: span.end_s - span.begin_s for span in spans}
        durations["total_s"] = end_s - start_s
        seen_s = max(self._marks.get(Mark.FIRST_TOKEN, end_s), self._marks.get(Mark.GRANTED, start_s))
        durations["time_to_first_token_s"] = min(seen_s, end_s) - start_s
        return durations
