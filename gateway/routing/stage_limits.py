"""How long each stage of an attempt may take, apart from the request's own deadline. Pure; takes a clock.

start ─QUEUE─ started ─PREFILL─ first token          granted and first token ─TRANSFER─ sealed ─VERIFY─ verified
                 └─GRANT─ granted                    verified ─FIRST_STEP─ token ─TOKEN─ token ─TOKEN─ ...

reserve ─LOCAL_PREFILL─ token ─TOKEN─ ...            where the decode worker computes the prompt: queue and prefill
"""

from enum import StrEnum

from core.clock import Clock, loop_time
from core.errors import Busy, TandemError, TransferFailed, WorkerLost


class Stage(StrEnum):
    QUEUE = "queue"
    PREFILL = "prefill"
    LOCAL_PREFILL = "local prefill"
    GRANT = "grant"
    TRANSFER = "transfer"
    VERIFY = "verify"
    FIRST_STEP = "first step"
    TOKEN = "token"


QUEUE_LIMIT_S = 60.0
PREFILL_LIMIT_S = 60.0
PREFILL_LIMIT_S_PER_TOKEN = 0.02
RESERVE_WAIT_S = 30.0
GRANT_LIMIT_S = RESERVE_WAIT_S + 5.0
TRANSFER_LIMIT_S = 30.0
VERIFY_LIMIT_S = 10.0
FIRST_STEP_LIMIT_S = 60.0
TOKEN_LIMIT_S = 60.0

_LIMITS_S = {
    Stage.QUEUE: QUEUE_LIMIT_S,
    Stage.PREFILL: PREFILL_LIMIT_S,
    Stage.LOCAL_PREFILL: QUEUE_LIMIT_S + PREFILL_LIMIT_S,
    Stage.GRANT: GRANT_LIMIT_S,
    Stage.TRANSFER: TRANSFER_LIMIT_S,
    Stage.VERIFY: VERIFY_LIMIT_S,
    Stage.FIRST_STEP: FIRST_STEP_LIMIT_S,
    Stage.TOKEN: TOKEN_LIMIT_S,
}


class StageLimits:
    """The stages that an attempt is in, each with the moment at which it is too late."""

    def __init__(self, num_tokens: int, clock: Clock = loop_time) -> None:
        self._num_tokens = num_tokens
        self._clock = clock
        self._until_s: dict[Stage, float] = {}

    def begin(self, stage: Stage) -> None:
        """The stage's time starts, again if it had."""
        limit_s = _LIMITS_S[stage]
        if stage in (Stage.PREFILL, Stage.LOCAL_PREFILL):
            limit_s += PREFILL_LIMIT_S_PER_TOKEN * self._num_tokens
        self._until_s[stage] = self._clock() + limit_s

    def end(self, *stages: Stage) -> None:
        for stage in stages:
            self._until_s.pop(stage, None)

    @property
    def left_s(self) -> float:
        """Until the first limit; infinite when there is none."""
        return min(self._until_s.values(), default=float("inf")) - self._clock()

    @property
    def first(self) -> Stage:
        """The stage whose limit comes first; there must be one."""
        return min(self._until_s, key=lambda stage: self._until_s[stage])

    def error(self) -> TandemError:
        """What it means that the first limit has passed. All but Busy may be tried again."""
        stage = self.first
        message = f"{stage}: not done within {_LIMITS_S[stage]:g} s"
        match stage:
            case Stage.QUEUE:
                return Busy(message)
            case Stage.TRANSFER | Stage.VERIFY:
                return TransferFailed(message)
            case _:
                return WorkerLost(message)
