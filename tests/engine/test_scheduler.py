"""Batching, chunks, prefix hits and preemption: whatever happens, a sequence gets the tokens that it gets alone."""

import itertools
import threading
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.clock import VirtualClock
from core.errors import InvalidRequest
from core.ids import HandoffId, RequestId
from core.sampling import SamplingParams
from engine.block_pool import BlockPool, BlockState
from engine.engine import Engine
from engine.guided import GuideFactory
from engine.hash_runner import HashRunner, expected_outputs
from engine.scheduler import MAX_PREEMPTIONS, MAX_SCORED, Progress, Sampled, Scheduler, SchedulerLimits, Work
from engine.sequence import FinishReason, Sequence

BLOCK = 16
CONTEXT = 400
_numbers = itertools.count(1)


def make_sequence(prompt: Seq[int], max_tokens: int = 4, credit: int = 1 << 30, **params: object) -> Sequence:
    sampling = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **params})
    handoff_id = HandoffId(RequestId(str(next(_numbers))), 1)
    return Sequence(handoff_id, list(prompt), len(prompt), sampling, "model", credit=credit)


class Rig:
    """An engine over the hashing runner; `run()` steps it, checking the pool after each step."""

    def __init__(self, num_blocks: int = 64, token_budget: int = 64, max_batch: int = 8) -> None:
        self.clock = VirtualClock()
        self.pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(
            SchedulerLimits(BLOCK, token_budget, max_batch, CONTEXT), self.pool, self.clock
        )
        self.engine = Engine(self.scheduler, HashRunner(num_blocks, BLOCK))
        self.finished: dict[HandoffId, FinishReason] = {}

    def submit(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.scheduler.submit(sequence)

    def step(self) -> list[Progress]:
        progress = self.engine.step()
        self.clock.advance(0.01)
        for item in progress:
            if item.finish_reason is not None:
                assert item.sequence.id not in self.finished
                self.finished[item.sequence.id] = item.finish_reason
                self.scheduler.finish(item.sequence)
        self.check()
        return progress

    def check(self) -> None:
        self.pool.check()
        scheduler = self.scheduler
        assert len(scheduler.running) + scheduler.num_reserved_places <= scheduler.limits.max_batch
        assert sum(item.num_tokens for item in self.engine.work) <= scheduler.limits.token_budget
        held = [block for sequence in scheduler.running for block in sequence.block_ids]
        assert len(set(held)) == self.pool.counts[BlockState.OWNED]
        assert all(not sequence.block_ids and not sequence.num_computed for sequence in scheduler.waiting)
        turns = [(s.params.priority, s.arrival) for s in scheduler.waiting]
        assert turns == sorted(turns)
        assert [s.arrival for s in scheduler.running] == sorted(s.arrival for s in scheduler.running)
        for sequences in (scheduler.waiting, scheduler.running):
            assert all(s.num_forced <= min(s.num_preemptions, MAX_PREEMPTIONS) for s in sequences)

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(
            f"not done after {max_steps} steps: {self.scheduler.waiting} {self.scheduler.running}"
        )

    def assert_idle(self) -> None:
        counts = self.pool.counts
        assert counts[BlockState.FREE] + counts[BlockState.CACHED] == self.pool.num_blocks
        assert not self.scheduler.running
        assert not self.scheduler.waiting


def outputs(sequence: Sequence) -> list[int]:
    return sequence.tokens[sequence.num_prompt_tokens :]


def alone(sequence: Sequence) -> list[int]:
    return expected_outputs(sequence.tokens[: sequence.num_prompt_tokens], sequence.params, CONTEXT)


def work_of(rig: Rig) -> list[tuple[HandoffId, int]]:
    return [(item.sequence.id, item.num_tokens) for item in rig.engine.work]


def test_of_a_burst_with_one_prefix_one_computes_it_and_the_others_find_it():
    rig = Rig(num_blocks=200, token_budget=64)
    shared = list(range(150))
    sequences = [make_sequence([*shared, 200 + number, 7]) for number in range(5)]
    rig.submit(*sequences)
    rig.run()
    assert [sequence.num_cached for sequence in sequences] == [0, *[9 * BLOCK] * 4]
    for sequence in sequences:
        assert outputs(sequence) == alone(sequence)


def test_who_waits_for_a_prefix_lets_others_by():
    rig = Rig(num_blocks=200, token_budget=64)
    leader, follower, other = make_sequence(range(150)), make_sequence(range(150)), make_sequence([9] * 20)
    rig.submit(leader, follower, other)
    rig.step()
    rig.step()
    rig.step()
    assert other in rig.scheduler.running or other.id in rig.finished
    rig.run()
    assert follower.num_cached == 9 * BLOCK


def test_a_prompt_is_computed_in_chunks_within_the_token_budget():
    rig = Rig(token_budget=20)
    sequence = make_sequence(range(50), max_tokens=2)
    rig.submit(sequence)
    chunks, samples = [], []
    while rig.scheduler.has_work:
        (progress,) = rig.step()
        chunks.append(rig.engine.work[0].num_tokens)
        samples.append(progress.token is not None)
    assert chunks == [20, 20, 10, 1]
    assert samples == [False, False, True, True]
    assert outputs(sequence) == alone(sequence)


def test_running_sequences_decode_before_any_prompt_gets_the_rest_of_the_budget():
    rig = Rig(token_budget=16)
    decoding = [make_sequence([number], max_tokens=8) for number in range(3)]
    rig.submit(*decoding)
    rig.step()
    long = make_sequence(range(100), max_tokens=1)
    rig.submit(long)
    rig.step()
    assert work_of(rig) == [*((sequence.id, 1) for sequence in decoding), (long.id, 13)]
    rig.step()
    assert work_of(rig) == [*((sequence.id, 1) for sequence in decoding), (long.id, 13)]


def test_sequences_wait_for_a_place_in_the_batch_in_order_of_arrival():
    rig = Rig(max_batch=2)
    sequences = [make_sequence([number], max_tokens=3) for number in range(4)]
    rig.submit(*sequences)
    rig.step()
    assert rig.scheduler.running == sequences[:2]
    rig.run()
    assert list(rig.finished) == [sequence.id for sequence in sequences]


def test_lower_priorities_are_admitted_first_and_equal_ones_in_order_of_arrival():
    rig = Rig(max_batch=1)
    sequences = [
        make_sequence([number], priority=priority) for number, priority in enumerate([0, 5, -1, 5, 0])
    ]
    rig.submit(*sequences)
    rig.run()
    assert list(rig.finished) == [sequences[at].id for at in (2, 0, 4, 1, 3)]


def test_scored_prompts_take_a_bounded_part_of_a_step_and_compute_what_is_cached():
    rig = Rig(token_budget=300, num_blocks=128)
    prompt = [number % 50 for number in range(MAX_SCORED + 70)]
    rig.submit(make_sequence(prompt))
    rig.run()
    scored = [make_sequence(prompt, num_prompt_logprobs=1) for _ in range(2)]
    plain = make_sequence([9] * 40)
    rig.submit(scored[0], plain, scored[1])
    rig.step()
    assert work_of(rig) == [(scored[0].id, MAX_SCORED), (plain.id, 40)]
    rig.step()
    assert work_of(rig) == [(plain.id, 1), (scored[0].id, 70), (scored[1].id, MAX_SCORED - 70)]
    rig.run()
    assert [outputs(sequence) for sequence in scored] == [alone(make_sequence(prompt))] * 2


def test_queue_time_is_that_until_the_first_step():
    rig = Rig(max_batch=1)
    first, second = make_sequence([1], max_tokens=5), make_sequence([2], max_tokens=1)
    rig.submit(first, second)
    rig.run()
    assert first.queue_s == 0
    assert second.queue_s == pytest.approx(0.05)


def test_a_repeated_prompt_shares_its_full_blocks_but_computes_at_least_one_token():
    rig = Rig()
    for num_tokens, num_cached in ((50, 48), (48, 32), (16, 0), (17, 16)):
        prompt = list(range(num_tokens))
        rig.submit(make_sequence(prompt))
        rig.run()
        again = make_sequence(prompt)
        rig.submit(again)
        rig.run()
        assert again.num_cached == num_cached
        assert outputs(again) == alone(again)


@given(
    num_shared=st.integers(0, 120),
    num_more=st.integers(1, 120),
    budget=st.integers(1, 70),
    num_tokens=st.integers(1, 20),
)
@settings(max_examples=60, deadline=None)
def test_chunks_after_a_prefix_hit_stay_within_the_sequence(num_shared, num_more, budget, num_tokens):
    """Whatever the budget, a chunk begins where the cached blocks end; the runner refuses any other range."""
    rig = Rig(token_budget=budget)
    prefix = list(range(num_shared))
    rig.submit(make_sequence([*prefix, 7], max_tokens=1))
    rig.run()
    sequence = make_sequence([*prefix, *range(500, 500 + num_more)], max_tokens=num_tokens)
    rig.submit(sequence)
    rig.run()
    assert sequence.num_cached == num_shared // BLOCK * BLOCK
    assert outputs(sequence) == alone(sequence)
    rig.assert_idle()


def test_a_long_prompt_over_a_block_of_256_with_a_chunk_size_that_is_no_multiple_of_it():
    clock, pool = VirtualClock(), BlockPool(8)
    scheduler = Scheduler(SchedulerLimits(256, 100, 4, 2048), pool, clock)
    engine = Engine(scheduler, HashRunner(8, 256))
    for prompt in (list(range(300)), list(range(465))):
        sequence = make_sequence(prompt, max_tokens=3)
        scheduler.submit(sequence)
        while scheduler.has_work:
            for progress in engine.step():
                if progress.finish_reason is not None:
                    scheduler.finish(sequence)
            pool.check()
        assert outputs(sequence) == expected_outputs(prompt, sequence.params, 2048)
    assert sequence.num_cached == 256


def test_identical_prompts_in_one_step_keep_their_own_blocks_under_eviction():
    """Neither is cached when both start; the duplicate blocks must not be freed under whoever still reads them."""
    rig = Rig(num_blocks=32, token_budget=128)
    twins = [make_sequence(range(40), max_tokens=120) for _ in range(2)]
    rig.submit(*twins)
    rig.step()
    assert not set(twins[0].block_ids) & set(twins[1].block_ids)
    for number in range(12):
        rig.submit(make_sequence([900 + number] * 40, max_tokens=6))
    rig.run()
    assert [outputs(twin) for twin in twins] == [alone(twin) for twin in twins]
    rig.assert_idle()


def test_out_of_blocks_the_newest_is_preempted_and_its_tokens_do_not_change():
    rig = Rig(num_blocks=12, max_batch=4)
    sequences = [make_sequence([number] * 30, max_tokens=60) for number in range(4)]
    rig.submit(*sequences)
    rig.run()
    assert sequences[0].num_preemptions == 0
    assert sum(sequence.num_preemptions for sequence in sequences) > 0
    for sequence in sequences:
        assert outputs(sequence) == alone(sequence)
    rig.assert_idle()


def test_two_sequences_that_fill_the_pool_alone_do_not_preempt_each_other_for_ever():
    rig = Rig(num_blocks=8)
    pair = [make_sequence([number] * 60, max_tokens=64) for number in range(2)]
    rig.submit(*pair)
    rig.run()
    assert pair[0].num_preemptions == 0
    assert pair[1].num_preemptions <= 1
    assert [outputs(sequence) for sequence in pair] == [alone(sequence) for sequence in pair]


def test_a_sequence_without_credit_is_passed_over_and_others_go_on():
    rig = Rig()
    slow, other = make_sequence([1], max_tokens=9, credit=3), make_sequence([2], max_tokens=9)
    rig.submit(slow, other)
    rig.run()
    assert len(outputs(slow)) == 3
    assert outputs(other) == alone(other)
    assert not rig.scheduler.has_work
    assert rig.step() == []
    slow.credit += 100
    rig.run()
    assert outputs(slow) == alone(slow)


def test_a_sequence_without_credit_is_preempted_before_any_other_however_old():
    rig = Rig(num_blocks=8)
    slow = make_sequence([1] * 60, max_tokens=60, credit=2)
    other = make_sequence([2] * 40, max_tokens=60)
    rig.submit(slow, other)
    rig.run()
    assert outputs(other) == alone(other)
    assert (slow.num_preemptions, other.num_preemptions) == (1, 0)
    slow.credit += 100
    rig.run()
    assert outputs(slow) == alone(slow)
    rig.assert_idle()


def test_a_preempted_sequence_without_credit_blocks_nobody_behind_it():
    rig = Rig(num_blocks=8)
    slow = make_sequence([1] * 60, max_tokens=60, credit=2)
    rig.submit(slow, make_sequence([2] * 40, max_tokens=60))
    rig.run()
    assert list(rig.scheduler.waiting) == [slow]
    later = make_sequence([3] * 20, max_tokens=5)
    rig.submit(later)
    rig.run()
    assert outputs(later) == alone(later)
    assert len(outputs(slow)) == 2


def test_preempted_ones_wait_in_order_of_arrival():
    rig = Rig(num_blocks=12, token_budget=256)
    slow, other = make_sequence([1] * 60, credit=2), make_sequence([2] * 60, max_tokens=110)
    newest = make_sequence([3] * 50, max_tokens=60)
    rig.submit(slow, other, newest)
    while not newest.num_preemptions:
        rig.step()
    assert rig.scheduler.waiting == [slow, newest]
    slow.credit = 100
    rig.run()
    assert list(rig.finished) == [sequence.id for sequence in (slow, other, newest)]


def preempted_often(prompt: Seq[int], max_tokens: int) -> Sequence:
    sequence = make_sequence(prompt, max_tokens)
    sequence.num_forced = sequence.num_preemptions = MAX_PREEMPTIONS
    return sequence


def test_one_at_the_bound_waits_for_all_that_older_ones_may_become_and_newer_ones_pass_it():
    rig = Rig(num_blocks=12)
    older, bound = make_sequence([1] * 20, max_tokens=100), preempted_often([2] * 20, max_tokens=80)
    newer, also_bound = make_sequence([3] * 20, max_tokens=28), preempted_often([4], max_tokens=4)
    rig.submit(older, bound, newer, also_bound)
    rig.step()
    rig.step()
    assert rig.scheduler.running == [older, newer], "8 + 7 blocks are more than 12, and one more waits behind"
    while older.id not in rig.finished:
        assert bound in rig.scheduler.waiting
        rig.step()
    rig.run()
    assert (older.num_preemptions, bound.num_preemptions) == (0, MAX_PREEMPTIONS)
    assert all(outputs(sequence) == alone(sequence) for sequence in (older, bound, newer, also_bound))


def test_one_at_the_bound_is_not_preempted_for_older_ones_but_newer_ones_are():
    rig = Rig(num_blocks=12)
    older, bound = make_sequence([1] * 20, max_tokens=60), preempted_often([2] * 20, max_tokens=90)
    newer = [make_sequence([number] * 30, max_tokens=60) for number in (3, 4)]
    rig.submit(older, bound, *newer)
    rig.run()
    assert (older.num_preemptions, bound.num_preemptions) == (0, MAX_PREEMPTIONS)
    assert sum(sequence.num_preemptions for sequence in newer) > 0
    assert all(outputs(sequence) == alone(sequence) for sequence in (older, bound, *newer))


def test_without_a_newer_one_the_shielded_wait_in_their_places_for_blocks_in_flight():
    rig = Rig(num_blocks=12)
    older, bound = make_sequence([1] * 20, max_tokens=60), preempted_often([2] * 20, max_tokens=60)
    rig.submit(older, bound)
    rig.step()
    in_flight = rig.pool.allocate(rig.pool.num_available, BlockState.IN_FLIGHT)
    for _ in range(40):
        rig.step()
    assert rig.scheduler.running == [older, bound]
    assert [len(sequence.tokens) for sequence in (older, bound)] == [33, 33]
    rig.pool.release(in_flight, BlockState.IN_FLIGHT)
    rig.run()
    assert (older.num_preemptions, bound.num_preemptions) == (0, MAX_PREEMPTIONS)
    assert all(outputs(sequence) == alone(sequence) for sequence in (older, bound))


def test_one_without_credit_makes_way_for_one_at_the_bound_and_that_is_not_counted():
    rig = Rig(num_blocks=12)
    slow, bound = make_sequence([1] * 20, max_tokens=100, credit=2), preempted_often([2] * 20, max_tokens=80)
    rig.submit(slow)
    rig.run()
    rig.submit(bound)
    rig.step()
    assert rig.scheduler.running == [bound]
    assert (slow.num_preemptions, slow.num_forced) == (1, 0)
    slow.credit += 100
    rig.step()
    assert rig.scheduler.running == [bound], "what both may become does not fit"
    rig.run()
    assert all(outputs(sequence) == alone(sequence) for sequence in (slow, bound))
    assert bound.num_preemptions == MAX_PREEMPTIONS


def test_one_that_was_preempted_comes_back_when_the_others_can_still_grow():
    rig = Rig(num_blocks=12)
    first = make_sequence([1] * 40, max_tokens=100)
    back, fresh = make_sequence([2] * 140, max_tokens=4), make_sequence([3] * 140, max_tokens=4)
    back.num_preemptions = 1
    rig.submit(first)
    rig.step()
    rig.submit(back)
    rig.step()
    assert rig.scheduler.running == [first]
    rig.scheduler.finish(back)
    rig.submit(fresh)
    rig.step()
    assert rig.scheduler.running == [first, fresh], "a new one need not leave a block for the first"


def test_a_waiting_prompt_goes_in_as_soon_as_its_blocks_are_free():
    rig = Rig(num_blocks=8)
    first, big, small = make_sequence([1] * 50, max_tokens=4), make_sequence([2] * 100), make_sequence([3])
    rig.submit(first, big, small)
    rig.step()
    assert rig.scheduler.running == [first], "nobody overtakes the head of the queue"
    while first.id not in rig.finished:
        rig.step()
    rig.step()
    assert rig.scheduler.running == [big]


def test_finish_works_in_any_state_and_twice():
    rig = Rig(max_batch=1, token_budget=16)
    running, waiting = make_sequence(range(40)), make_sequence([2])
    rig.submit(running, waiting)
    rig.step()
    for sequence in (running, waiting, running, waiting):
        rig.scheduler.finish(sequence)
        rig.pool.check()
    rig.assert_idle()


@pytest.mark.parametrize(
    ("prompt_len", "max_len", "can_run"),
    [(0, 0, False), (1, 2, True), (128, 128, True), (128, 129, False), (399, 400, False), (100, 400, False)],
)
def test_what_can_never_run_is_known_before_it_is_submitted(prompt_len, max_len, can_run):
    rig = Rig(num_blocks=8)
    assert rig.scheduler.can_run(make_sequence(range(prompt_len)), max_len) is can_run


def test_the_context_leaves_room_for_a_token():
    scheduler = Rig(num_blocks=64).scheduler
    assert scheduler.can_run(make_sequence(range(CONTEXT - 1)), CONTEXT)
    assert not scheduler.can_run(make_sequence(range(CONTEXT)), CONTEXT)


def test_an_output_ends_with_the_context():
    rig = Rig()
    sequence = make_sequence(range(CONTEXT - 3), max_tokens=50)
    rig.submit(sequence)
    rig.run()
    assert len(outputs(sequence)) == 3
    assert rig.finished[sequence.id] is FinishReason.LENGTH


def test_a_stop_token_ends_the_output_but_not_when_it_is_in_the_prompt():
    rig = Rig()
    free = make_sequence([5, 6, 7], max_tokens=6)
    stop_id = alone(free)[2]
    stopped = make_sequence([5, 6, 7], max_tokens=6, stop_token_ids=(stop_id,))
    in_prompt = make_sequence([5, 6, stop_id], max_tokens=2, stop_token_ids=(stop_id,))
    rig.submit(stopped, in_prompt)
    rig.run()
    assert outputs(stopped) == alone(free)[:3]
    assert rig.finished[stopped.id] is FinishReason.STOP
    assert rig.finished[in_prompt.id] is FinishReason.LENGTH


def test_blocks_of_logits_that_are_not_finite_are_not_registered():
    rig = Rig()
    sequence = make_sequence(range(40))
    rig.submit(sequence)
    work = rig.scheduler.schedule()
    (progress,) = rig.scheduler.commit(work, {sequence.id: Sampled(0, 0.0, False)})
    assert progress.token is not None
    assert not progress.token.is_valid
    assert progress.finish_reason is None
    rig.scheduler.finish(sequence)
    assert rig.pool.counts[BlockState.FREE] == rig.pool.num_blocks


class Failing(HashRunner):
    """Raises once, when told, after it has computed."""

    should_fail = False

    def run(self, work: Seq[Work]) -> dict[HandoffId, Sampled]:
        sampled = super().run(work)
        if self.should_fail:
            self.should_fail = False
            raise RuntimeError("the device is gone")
        return sampled


def test_a_step_that_raises_leaves_a_state_from_which_it_can_be_done_again():
    rig = Rig(num_blocks=12)
    runner = rig.engine.runner = Failing(12, BLOCK)
    sequences = [make_sequence([number] * 33, max_tokens=30) for number in range(3)]
    rig.submit(*sequences)
    for _ in range(200):
        if not rig.scheduler.has_work:
            break
        runner.should_fail = True
        with pytest.raises(RuntimeError):
            rig.step()
        rig.check()
        rig.step()
    for sequence in sequences:
        assert outputs(sequence) == alone(sequence)
    rig.assert_idle()


class Crowd:
    """Many sequences over one small pool, and what was done to them."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.sequences: list[Sequence] = []
        self.aborted: set[HandoffId] = set()

    def arrive(self, kind: int, num_prompt_tokens: int, max_tokens: int, credit: int) -> None:
        self.sequences.append(make_sequence([kind] * num_prompt_tokens, max_tokens, credit))
        self.rig.submit(self.sequences[-1])

    def abort(self, index: int) -> None:
        sequence = self._pick(index)
        if sequence is not None and sequence.id not in self.rig.finished:
            self.aborted.add(sequence.id)
            self.rig.scheduler.finish(sequence)

    def credit(self, index: int, num_tokens: int) -> None:
        sequence = self._pick(index)
        if sequence is not None:
            sequence.credit += num_tokens

    def step(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()

    def forget(self) -> None:
        self.rig.pool.clear_cache()

    def finish(self) -> None:
        for sequence in self.sequences:
            sequence.credit = 1 << 30
        self.rig.run()

    def _pick(self, index: int) -> Sequence | None:
        return self.sequences[index] if index < len(self.sequences) else None


CREDITS = st.sampled_from([1 << 30, 1 << 30, 2, 5])
INDEX = st.integers(0, 20)
ACTIONS = st.one_of(
    st.tuples(st.just(Crowd.arrive), st.integers(0, 2), st.integers(1, 70), st.integers(1, 50), CREDITS),
    st.tuples(st.just(Crowd.abort), INDEX),
    st.tuples(st.just(Crowd.credit), INDEX, st.integers(1, 30)),
    st.tuples(st.just(Crowd.step), st.integers(1, 8)),
    st.tuples(st.just(Crowd.forget)),
)


@given(
    actions=st.lists(ACTIONS, max_size=40),
    num_blocks=st.integers(8, 20),
    budget=st.integers(1, 48),
    max_batch=st.integers(1, 5),
)
@settings(max_examples=120, deadline=None)
def test_whatever_arrives_leaves_or_stalls_each_gets_its_own_tokens(actions, num_blocks, budget, max_batch):
    crowd = Crowd(Rig(num_blocks, budget, max_batch))
    for action, *arguments in actions:
        action(crowd, *arguments)
        crowd.rig.pool.check()
    crowd.finish()
    crowd.rig.assert_idle()
    for sequence in crowd.sequences:
        whole, made = alone(sequence), outputs(sequence)
        assert made == (whole[: len(made)] if sequence.id in crowd.aborted else whole)
        assert (sequence.id in crowd.rig.finished) != (sequence.id in crowd.aborted)
        assert sequence.num_forced <= MAX_PREEMPTIONS


def test_one_whose_grammar_still_compiles_is_passed_over_and_one_that_has_none_is_named(tiny_model):
    factory = GuideFactory(tiny_model, 512)
    may_compile = threading.Event()
    factory._thread.submit(may_compile.wait)  # what the thread has to do before
    rig = Rig()
    guided, wrong, plain = make_sequence([1, 2]), make_sequence([3, 4]), make_sequence([5, 6])
    guided.guide, wrong.guide = factory.guide('start: "a"'), factory.guide("start: /[/")
    rig.submit(guided, wrong, plain)
    rig.run()
    assert set(rig.finished) == {plain.id}
    assert rig.scheduler.misguided == []
    may_compile.set()
    assert guided.guide is not None and wrong.guide is not None
    guided.guide.wait()
    wrong.guide.wait()
    ((named, error),) = rig.scheduler.misguided
    assert named is wrong and isinstance(error, InvalidRequest)
    rig.scheduler.finish(wrong)
    rig.run()
    assert set(rig.finished) == {plain.id, guided.id}
    rig.assert_idle()
    factory.close()
