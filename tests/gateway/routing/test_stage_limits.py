"""Which stage is too late, when, and what that means."""

import math

import pytest

from core.clock import VirtualClock
from core.errors import Busy, TransferFailed, WorkerLost
from gateway.routing.stage_limits import (
    PREFILL_LIMIT_S,
    PREFILL_LIMIT_S_PER_TOKEN,
    QUEUE_LIMIT_S,
    TOKEN_LIMIT_S,
    VERIFY_LIMIT_S,
    Stage,
    StageLimits,
)


def test_without_a_stage_there_is_no_limit():
    limits = StageLimits(1, VirtualClock())
    assert limits.left_s == math.inf
    limits.begin(Stage.QUEUE)
    limits.end(Stage.QUEUE, Stage.GRANT)
    assert limits.left_s == math.inf


def test_of_several_stages_the_first_limit_counts():
    clock = VirtualClock()
    limits = StageLimits(1, clock)
    limits.begin(Stage.QUEUE)
    clock.advance(QUEUE_LIMIT_S - 1)
    assert limits.left_s == pytest.approx(1)
    limits.begin(Stage.VERIFY)
    assert limits.first is Stage.QUEUE
    limits.end(Stage.QUEUE)
    assert limits.left_s == pytest.approx(VERIFY_LIMIT_S)


def test_a_stage_that_begins_again_has_its_whole_time():
    clock = VirtualClock()
    limits = StageLimits(1, clock)
    for _ in range(5):
        limits.begin(Stage.TOKEN)
        clock.advance(TOKEN_LIMIT_S / 2)
    assert limits.left_s == pytest.approx(TOKEN_LIMIT_S / 2)


def test_a_long_prompt_may_take_longer():
    limits = StageLimits(1000, VirtualClock())
    limits.begin(Stage.PREFILL)
    assert limits.left_s == PREFILL_LIMIT_S + 1000 * PREFILL_LIMIT_S_PER_TOKEN


@pytest.mark.parametrize("stage", Stage)
def test_what_is_too_late_is_named_and_all_but_a_queue_is_tried_again(stage):
    limits = StageLimits(1, VirtualClock())
    limits.begin(stage)
    error = limits.error()
    assert stage in str(error)
    is_transfer = stage in (Stage.TRANSFER, Stage.VERIFY)
    kind = Busy if stage is Stage.QUEUE else TransferFailed if is_transfer else WorkerLost
    assert type(error) is kind
    assert error.retryable == (stage is not Stage.QUEUE)
