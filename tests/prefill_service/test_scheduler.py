"""The prefill tier as its engine process drives it: commands in, events out, blocks back whatever the order."""

from collections.abc import Sequence as Seq

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.block_hash import hash_chain
from core.clock import VirtualClock
from core.errors import ErrorCode
from core.ids import HandoffId, RequestId
from core.sampling import SamplingParams
from engine.block_pool import BlockPool, BlockState
from engine.engine import Engine
from engine.hash_runner import HashRunner, expected_outputs
from engine.messages import (
    AbortWork,
    AnyCommand,
    AnyEvent,
    Computed,
    First,
    Granted,
    Release,
    Started,
    StartPrompt,
    WorkAborted,
    WorkFailed,
)
from engine.scheduler import Sampled, Scheduler, SchedulerLimits, Work
from prefill_service.scheduler import MAX_UNGRANTED, PrefillTier

BLOCK, CONTEXT = 16, 300


class Runner(HashRunner):
    """As told: raises, or draws from logits that are not finite for one id."""

    error: Exception | None = None
    not_finite: HandoffId | None = None
    num_computed = 0

    def run(self, work: Seq[Work]) -> dict[HandoffId, Sampled]:
        self.num_computed += sum(item.num_tokens for item in work)
        sampled = super().run(work)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return {key: s._replace(is_valid=key != self.not_finite) for key, s in sampled.items()}


class Rig:
    def __init__(self, num_blocks: int = 16, token_budget: int = 32, max_batch: int = 4) -> None:
        self.pool = BlockPool(num_blocks)
        self.runner = Runner(num_blocks, BLOCK)
        limits = SchedulerLimits(BLOCK, token_budget, max_batch, CONTEXT)
        self.tier = PrefillTier(Engine(Scheduler(limits, self.pool, VirtualClock()), self.runner), "model")
        self.tier.engine.on_scheduled = self.tier.announce

    def do(self, *commands: AnyCommand) -> list[AnyEvent]:
        for command in commands:
            self.tier.handle(command)
            self.pool.check()
        return self.take()

    def take(self) -> list[AnyEvent]:
        events, self.tier.events = self.tier.events, []
        return events

    def step(self) -> list[AnyEvent]:
        try:
            self.tier.step()
        except RuntimeError as error:
            self.tier.fail_step(error)
        self.pool.check()
        return self.take()

    def run(self, releases: bool = False) -> list[AnyEvent]:
        """Until nothing is left to do. `releases`: as if each seal were verified at once."""
        events: list[AnyEvent] = []
        for _ in range(500):
            new = self.step()
            if not new and not self.tier.engine.scheduler.has_work:
                return events
            events += new
            if releases:
                self.do(*(Release(event.id) for event in new if isinstance(event, First)))
        raise AssertionError("not done")

    def is_idle(self) -> bool:
        return self.pool.num_available == self.pool.num_blocks and not self.tier.num_waiting


def id_of(number: int, attempt: int = 1) -> HandoffId:
    return HandoffId(RequestId(str(number)), attempt)


def start(number: int, prompt: Seq[int], output: Seq[int] = (), **params: object) -> StartPrompt:
    sampling = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **params})
    return StartPrompt(id_of(number), list(prompt), list(output), sampling)


def take_over(number: int, prompt: Seq[int], output: Seq[int] = (), attempt: int = 2) -> StartPrompt:
    params = SamplingParams(max_tokens=8, temperature=0.0)
    return StartPrompt(id_of(number, attempt), list(prompt), list(output), params, attempt - 1)


def test_a_prompt_is_announced_computed_in_chunks_and_ends_with_its_first_token():
    rig = Rig(token_budget=20)
    rig.do(start(1, range(50)))
    started, *computed, first = rig.run()
    assert isinstance(started, Started)
    assert len(started.block_ids) == 4
    assert [event.num_tokens for event in computed] == [20, 40, 50]
    assert isinstance(first, First)
    (token,) = first.first_tokens
    assert token.token_id == expected_outputs(range(50), SamplingParams(1, 0.0), CONTEXT)[0]
    assert (token.choice, token.position, token.is_finished, first.finish_reasons) == (0, 0, False, [""])
    assert first.chain_hash == hash_chain(range(50), "model")[-1]


def test_prompts_of_another_salt_find_nothing_cached():
    rig, prompt = Rig(), range(50)
    cached = []
    for number, salt in enumerate((b"a", b"b", b"", b"a", b"b", b"")):
        command = start(number, prompt)
        rig.do(msgspec.structs.replace(command, cache_salt=salt))
        started, *_, first = rig.run()
        cached.append(started.num_cached_tokens)
        assert first.chain_hash == hash_chain(prompt, "model", salt=salt)[-1]
        rig.do(Release(id_of(number)))
    assert cached == [0, 0, 0, 48, 48, 48]


def test_started_comes_before_the_step_computes():
    rig = Rig()
    seen: list[list[AnyEvent]] = []

    def announce(work: list[Work]) -> None:
        rig.tier.announce(work)
        seen.append(rig.take())

    rig.tier.engine.on_scheduled = announce
    rig.do(start(1, range(40)))
    rig.step()
    assert [type(event) for event in seen[0]] == [Started]
    rig.step()
    assert seen[1:] == [[]]


def test_blocks_are_leased_until_released_and_stay_cached():
    rig = Rig()
    rig.do(start(1, range(40)))
    rig.run()
    assert rig.pool.counts[BlockState.LEASED] == 3
    assert rig.do(Release(id_of(1))) == []
    assert rig.is_idle()
    rig.do(start(2, range(40)))
    started = rig.run()[0]
    assert started.num_cached_tokens == 32


def test_leases_of_a_shared_prefix_are_counted():
    rig = Rig()
    for number in (1, 2):
        rig.do(start(number, range(40)))
        rig.run()
    assert rig.pool.counts[BlockState.LEASED] == 4
    rig.do(Release(id_of(1)))
    assert rig.pool.counts[BlockState.LEASED] == 3
    rig.do(AbortWork(id_of(2)))
    assert rig.is_idle()


def test_a_prompt_of_less_than_a_block_has_no_chain_hash():
    rig = Rig()
    rig.do(start(1, [5]))
    assert rig.run()[-1].chain_hash == b""


@pytest.mark.parametrize(("params", "reason"), [({"max_tokens": 1}, "length"), ({"stop": True}, "stop")])
def test_a_first_token_that_ends_the_request_says_so(params, reason):
    rig = Rig()
    first_id = expected_outputs([1, 2], SamplingParams(1, 0.0), CONTEXT)[0]
    if params.pop("stop", False):
        params["stop_token_ids"] = (first_id,)
    rig.do(start(1, [1, 2], **params))
    first = rig.run()[-1]
    assert first.finish_reasons == [reason]
    assert first.first_tokens[0].is_finished
    assert rig.do(AbortWork(id_of(1))) == [WorkAborted(id_of(1))]
    assert rig.is_idle()


def test_a_continuation_is_sampled_at_its_own_position():
    params = SamplingParams(8, 0.7, seed=5)
    whole = expected_outputs(range(20), params, CONTEXT)
    rig = Rig()
    rig.do(StartPrompt(id_of(1), list(range(20)), whole[:3], params))
    (token,) = rig.run()[-1].first_tokens
    assert (token.position, token.token_id) == (3, whole[3])


@pytest.mark.parametrize("prompt", [[], range(16 * 16 + 1), range(CONTEXT)])
def test_a_prompt_that_can_never_run_is_refused_and_holds_nothing(prompt):
    rig = Rig()
    (failed,) = rig.do(start(1, prompt))
    assert isinstance(failed, WorkFailed)
    assert failed.code == ErrorCode.INVALID
    assert rig.run() == []
    assert rig.is_idle()
    assert rig.do(AbortWork(id_of(1))) == [WorkAborted(id_of(1))]


def test_a_repeated_start_changes_nothing_at_any_stage():
    rig = Rig(token_budget=16)
    rig.do(start(1, range(40)), start(1, range(40)))
    rig.step()
    rig.do(start(1, range(40)))
    events = rig.run()
    assert sum(isinstance(event, First) for event in events) == 1
    rig.do(start(1, range(40)))
    assert rig.run() == []
    rig.do(Release(id_of(1)))
    assert rig.is_idle()


def test_commands_for_an_unknown_id_are_harmless_and_an_abort_is_answered():
    rig = Rig()
    assert rig.do(Release(id_of(9)), AbortWork(id_of(9)), AbortWork(id_of(9))) == [WorkAborted(id_of(9))] * 2
    assert rig.is_idle()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_a_release_before_the_end_leaves_no_lease_behind(num_steps):
    rig = Rig(token_budget=16)
    rig.do(start(1, range(40)))
    for _ in range(num_steps):
        rig.step()
    rig.do(Release(id_of(1)))
    assert rig.run() == []
    assert rig.is_idle()


def test_logits_that_are_not_finite_fail_only_their_request():
    rig = Rig()
    rig.runner.not_finite = id_of(1)
    rig.do(start(1, range(10)), start(2, range(100, 112)))
    events = rig.run()
    (failed,) = [event for event in events if isinstance(event, WorkFailed)]
    assert (failed.id, failed.code) == (id_of(1), ErrorCode.ENGINE)
    assert [event.id for event in events if isinstance(event, First)] == [id_of(2)]
    rig.do(Release(id_of(2)))
    assert rig.is_idle()


def test_a_step_that_raises_fails_those_that_it_computed_and_the_others_go_on():
    rig = Rig(max_batch=2)
    rig.do(start(1, range(10)), start(2, range(10)), start(3, range(200, 210)))
    rig.runner.error = RuntimeError("no memory")
    failed = [event for event in rig.step() if isinstance(event, WorkFailed)]
    assert [event.id for event in failed] == [id_of(1), id_of(2)]
    assert all(event.code == ErrorCode.ENGINE and "no memory" in event.message for event in failed)
    events = rig.run()
    assert [event.id for event in events if isinstance(event, First)] == [id_of(3)]
    rig.do(Release(id_of(3)))
    assert rig.is_idle()


def test_a_lease_survives_the_failure_of_a_later_step():
    rig = Rig()
    rig.do(start(1, range(40)))
    rig.run()
    rig.runner.error = RuntimeError("once")
    rig.do(start(2, range(40)))
    rig.step()
    assert rig.pool.counts[BlockState.LEASED] == 3
    rig.do(Release(id_of(1)))
    assert rig.is_idle()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 9])
def test_another_attempt_takes_over_what_is_computed_at_any_stage(num_steps):
    alone = Rig(token_budget=16)
    alone.do(start(1, range(40)))
    expected = next(event for event in alone.run() if isinstance(event, First))
    rig = Rig(token_budget=16)
    rig.do(start(1, range(40)))
    for _ in range(num_steps):
        rig.step()
    events = [*rig.do(take_over(1, range(40))), *rig.run()]
    (started,) = [event for event in events if isinstance(event, Started)]
    (first,) = [event for event in events if isinstance(event, First)]
    assert (started.id, started.num_tokens, len(started.block_ids)) == (id_of(1, 2), 40, 3)
    assert (first.id, first.first_tokens) == (id_of(1, 2), expected.first_tokens)
    assert first.chain_hash == expected.chain_hash
    assert max(event.num_tokens for event in events if isinstance(event, Computed)) == 40
    assert rig.runner.num_computed == 40, "no token is computed twice"
    assert rig.do(AbortWork(id_of(1))) == [WorkAborted(id_of(1))], "the earlier one holds nothing"
    assert not rig.is_idle()
    rig.do(Release(id_of(1, 2)))
    assert rig.is_idle()


def test_what_is_taken_over_may_cover_less_than_is_committed_by_now():
    rig = Rig()
    rig.do(start(1, range(40)))
    rig.run()
    (started, _, first) = rig.do(take_over(1, range(40), [first_token_of(range(40))]))
    assert isinstance(started, Started)
    assert started.num_tokens == 40
    assert isinstance(first, First)
    assert first.first_tokens[0].position == 0


def test_without_anything_to_take_over_the_prompt_is_computed():
    rig = Rig()
    rig.do(take_over(1, range(40), [5]))
    events = rig.run()
    (started,) = [event for event in events if isinstance(event, Started)]
    (first,) = [event for event in events if isinstance(event, First)]
    assert started.num_tokens == 41
    assert first.first_tokens[0].position == 1


def first_token_of(prompt: Seq[int]) -> int:
    rig = Rig()
    rig.do(start(1, prompt))
    return next(event for event in rig.run() if isinstance(event, First)).first_tokens[0].token_id


def test_prompts_that_nobody_grants_are_bounded_and_the_rest_waits():
    rig = Rig(num_blocks=200, token_budget=300, max_batch=64)

    def num_firsts() -> int:
        events = [event for _ in range(3) for event in rig.step()]
        return len([event for event in events if isinstance(event, First)])

    rig.do(*(start(number, [number] * 10) for number in range(MAX_UNGRANTED + 5)))
    assert num_firsts() == MAX_UNGRANTED
    assert rig.tier.num_waiting == 5
    rig.do(Granted(id_of(0)), Granted(id_of(1)), AbortWork(id_of(2)), Release(id_of(0)), Granted(id_of(0)))
    assert num_firsts() == 3
    rig.do(take_over(3, [3] * 10))
    assert num_firsts() == 0
    assert rig.tier.num_waiting == 2


COMMANDS = st.one_of(
    st.builds(start, st.integers(0, 3), st.integers(0, 60).map(range)),
    st.builds(lambda number: Release(id_of(number)), st.integers(0, 3)),
    st.builds(lambda number: AbortWork(id_of(number)), st.integers(0, 3)),
    st.builds(take_over, st.integers(0, 3), st.integers(1, 60).map(range), attempt=st.integers(2, 3)),
    st.builds(lambda number, attempt: Granted(id_of(number, attempt)), st.integers(0, 3), st.integers(1, 3)),
    st.sampled_from(["step", "step", "fail", "nan"]),
)


@given(commands=st.lists(COMMANDS, max_size=40), budget=st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_any_order_of_commands_and_faults_leaves_every_block_free_in_the_end(commands, budget):
    rig = Rig(num_blocks=6, token_budget=budget)
    num_aborts = num_answers = 0
    leased: set[HandoffId] = set()
    for command in commands:
        rig.runner.not_finite = id_of(0) if command == "nan" else None
        rig.runner.error = RuntimeError("told to") if command == "fail" else None
        events = rig.step() if isinstance(command, str) else rig.do(command)
        num_aborts += isinstance(command, AbortWork)
        num_answers += sum(isinstance(event, WorkAborted) for event in events)
        leased |= {event.id for event in events if isinstance(event, First)}
        rig.runner.error = None
    assert num_answers == num_aborts
    rig.runner.not_finite = None
    rig.do(*map(Release, leased))
    events = rig.run(releases=True)
    ends = [event.id for event in events if isinstance(event, First | WorkFailed)]
    assert len(ends) == len(set(ends))
    assert all(event.num_tokens > 0 for event in events if isinstance(event, Computed))
    rig.do(*(AbortWork(id_of(number, attempt)) for number in range(4) for attempt in (1, 2, 3)))
    assert rig.is_idle()
    assert not rig.tier._ungranted
