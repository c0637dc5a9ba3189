"""What an engine counts of its steps, against a shadow count made from the schedule itself."""

import random
from collections import Counter
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from core.clock import VirtualClock
from core.ids import HandoffId, RequestId
from core.load import BATCH_BOUNDS, STEP_BOUNDS_S
from core.sampling import SamplingParams
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.hash_runner import HashRunner
from engine.scheduler import Sampled, Scheduler, SchedulerLimits, Work
from engine.sequence import Sequence

BLOCK = 16


class TimedRunner(HashRunner):
    """Its steps take what they are told to."""

    def __init__(self, num_blocks: int, clock: VirtualClock, durations_s: list[float]) -> None:
        super().__init__(num_blocks, BLOCK)
        self._clock = clock
        self._durations_s = durations_s
        self.took_s: list[float] = []

    def run(self, work: list[Work]) -> dict[HandoffId, Sampled]:
        self.took_s.append(self._durations_s[len(self.took_s) % len(self._durations_s)])
        self._clock.advance(self.took_s[-1])
        return super().run(work)


def make_sequence(number: int, num_tokens: int, max_tokens: int) -> Sequence:
    """Some share their beginnings."""
    rng = random.Random(number % 3)
    prompt = [rng.randrange(256) for _ in range(num_tokens)]
    params = SamplingParams(max_tokens, temperature=0.0)
    return Sequence(HandoffId(RequestId(str(number)), 1), prompt, num_tokens, params, "m")


@given(
    st.lists(st.tuples(st.integers(1, 80), st.integers(1, 60)), min_size=1, max_size=8),
    st.lists(st.sampled_from([0.0001, 0.001, 0.002, 0.3, 7.0]), min_size=1, max_size=5),
)
def test_steps_and_tokens_are_counted_exactly_through_preemptions(sizes, durations_s):
    clock, pool = VirtualClock(), BlockPool(12)
    scheduler = Scheduler(SchedulerLimits(BLOCK, 32, 4, 400), pool, clock)
    runner = TimedRunner(12, clock, durations_s)
    engine = Engine(scheduler, runner)
    batches: list[int] = []
    preempted: Counter[HandoffId] = Counter()
    cached: dict[HandoffId, int] = {}
    computed: Counter[HandoffId] = Counter()
    num_computed = 0

    def look(work: list[Work]) -> None:
        nonlocal num_computed
        batches.append(len(work))
        for sequence, num_tokens in work:
            cached.setdefault(sequence.id, sequence.num_computed)
            num_computed += num_tokens

    engine.on_scheduled = look
    for number, (num_tokens, max_tokens) in enumerate(sizes):
        scheduler.submit(make_sequence(number, num_tokens, max_tokens))
    while scheduler.has_work:
        for sequence, _, reason in engine.step():
            computed[sequence.id] = max(computed[sequence.id], sequence.num_computed)
            preempted[sequence.id] = sequence.num_preemptions
            if reason is not None:
                scheduler.finish(sequence)

    counts = engine.counts.read(scheduler.num_preemptions)
    assert counts.num_preemptions == preempted.total()
    fresh = counts.num_prompt_tokens + counts.num_output_tokens
    assert fresh == sum(computed[key] - cached[key] for key in computed)
    assert fresh + counts.num_recomputed_tokens == num_computed
    assert counts.num_recomputed_tokens == 0 or counts.num_preemptions
    assert counts.num_batched == sum(batches)
    assert abs(counts.steps_s - sum(runner.took_s)) < 1e-9
    for bounds, buckets, values in (
        (STEP_BOUNDS_S, counts.steps_by_time, runner.took_s),
        (BATCH_BOUNDS, counts.steps_by_batch, batches),
    ):
        margin = 1e-9 if bounds is STEP_BOUNDS_S else 0
        expected = [sum(value <= bound - margin for value in values) for bound in bounds]
        most = [sum(value <= bound + margin for value in values) for bound in bounds]
        found = list(accumulate(buckets))
        assert all(low <= count <= high for low, count, high in zip(expected, found, most, strict=False))
        assert found[-1] == len(values)


def test_prompt_and_output_tokens_are_told_apart():
    pool, clock = BlockPool(12), VirtualClock()
    engine = Engine(Scheduler(SchedulerLimits(BLOCK, 32, 4, 400), pool, clock), HashRunner(12, BLOCK))
    engine.scheduler.submit(make_sequence(0, 50, 8))
    while not any(item.finish_reason for item in engine.step()):
        pass
    counts = engine.counts.read(0)
    assert (counts.num_prompt_tokens, counts.num_output_tokens) == (50, 7)
    assert (counts.num_recomputed_tokens, counts.num_preemptions) == (0, 0)
