"""Many steps at once are the same as one after the other."""

from hypothesis import given
from hypothesis import strategies as st

from core.clock import VirtualClock
from core.ids import HandoffId, RequestId
from core.sampling import SamplingParams
from engine.block_pool import BlockPool
from engine.leap import leap, num_steady_steps
from engine.scheduler import Sampled, Scheduler, SchedulerLimits
from engine.sequence import Sequence

TOKEN = Sampled(7, -1.0, True)
LIMITS = SchedulerLimits(block_size=16, token_budget=64, max_batch=6, context_len=160)


def make(prompts: list[tuple[int, int, int]], num_blocks: int, has_cache: bool) -> Scheduler:
    scheduler = Scheduler(LIMITS, BlockPool(num_blocks, has_cache), VirtualClock())
    for number, (length, max_tokens, credit) in enumerate(prompts):
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        handoff_id = HandoffId(RequestId(str(number)), 1)
        scheduler.submit(Sequence(handoff_id, [number] * length, length, params, "m", credit=credit))
    return scheduler


def step(scheduler: Scheduler) -> list[Sequence]:
    """One usual step; those that ended."""
    work = scheduler.schedule()
    progress = scheduler.commit(work, {item.sequence.id: TOKEN for item in work if item.needs_token})
    ended = [item.sequence for item in progress if item.finish_reason is not None]
    for sequence in ended:
        scheduler.finish(sequence)
    scheduler.pool.check()
    return ended


def told(scheduler: Scheduler) -> tuple[object, ...]:
    """All that another step depends on, but for which block is whose."""
    sequences = [
        (s.id, len(s.tokens), s.num_computed, len(s.block_ids), s.credit, s.num_preemptions)
        for s in (*scheduler.running, *scheduler.waiting)
    ]
    return sequences, scheduler.pool.counts, sorted(scheduler.pool.cached_hashes())


PROMPTS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 90), st.sampled_from([5, 40, 1 << 30])),
    min_size=1,
    max_size=6,
)


@given(PROMPTS, st.integers(10, 60), st.booleans(), st.data())
def test_a_leap_is_as_many_steps(prompts, num_blocks, has_cache, data):
    one, other = make(prompts, num_blocks, has_cache), make(prompts, num_blocks, has_cache)
    num_leaps = 0
    for _ in range(400):
        num_steps = num_steady_steps(one)
        if num_steps:
            num_steps = data.draw(st.integers(1, num_steps))
            ended = [progress.sequence for progress in leap(one, num_steps, TOKEN)]
            for sequence in ended:
                one.finish(sequence)
            one.pool.check()
            num_leaps += 1
        else:
            num_steps, ended = 1, step(one)
        others = [sequence for _ in range(num_steps) for sequence in step(other)]
        assert [s.id for s in ended] == [s.id for s in others]
        assert told(one) == told(other)
        if not one.has_work:
            break


def test_it_leaps_to_the_next_end():
    scheduler = make([(20, 30, 1 << 30), (20, 12, 1 << 30)], 40, has_cache=True)
    assert num_steady_steps(scheduler) == 0
    step(scheduler)
    assert num_steady_steps(scheduler) == 11
    (ended,) = leap(scheduler, 11, TOKEN)
    assert ended.sequence.id.request_id == "1"
