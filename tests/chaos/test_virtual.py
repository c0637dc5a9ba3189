"""Random harm to a whole virtual cluster, shrunk by hypothesis when something is wrong. After each history: every
request had exactly one end, its tokens are those of one process or it has a typed error that the harm explains, and
every block of every living worker is free or cached again."""

import asyncio
import itertools
import logging
import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from core.errors import Busy, Cancelled, TandemError, TransferFailed, Unavailable, WorkerLost
from core.sampling import SamplingParams
from core.worker import Role
from gateway.generation import GenerationRequest
from kv_transfer.faults import Faults, Stage
from tests.chaos.virtual_cluster import VOCAB, VirtualCluster, expected_tokens
from tests.chaos.virtual_time import VirtualTimeLoop, run_virtually

SETTLE_S = 200.0
EXPLAINED = (Busy, Cancelled, TransferFailed, Unavailable, WorkerLost)
NAMES = {Role.PREFILL: ("prefill-0", "prefill-1"), Role.DECODE: ("decode-0", "decode-1")}
FAULTS = st.sampled_from(
    [
        Faults(),
        Faults(corrupts=True, every=2),
        Faults(corrupts=True, every=3),
        Faults(drops_seal=True, every=4),
        Faults(fails_at=Stage.OPEN, every=3),
        Faults(fails_at=Stage.SEND, every=3),
        Faults(fails_at=Stage.SEAL, every=3),
        Faults(delay_s=0.2),
        Faults(reorders=True),
        Faults(duplicates=True, every=3),
        Faults(drops_run=True, every=3),
        Faults(seal_first=True, every=3),
    ]
)
TOTALS: Counter[str] = Counter()
SHRINKS = "CHAOS_SHRINK" in os.environ  # minutes: for whoever looks for the cause


class ClusterUnderHarm(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
        self.requests: list[tuple[asyncio.Task[list[int]], list[int], SamplingParams]] = []
        self.left: set[int] = set()

    @initialize(
        world=st.integers(0, 2**32), first=FAULTS, second=FAULTS, num_blocks=st.sampled_from([12, 24, 40])
    )
    def start(self, world: int, first: Faults, second: Faults, num_blocks: int) -> None:
        async def enter() -> VirtualCluster:
            faults = {"prefill-0": first, "prefill-1": second}
            return await VirtualCluster(world, num_blocks=num_blocks, faults=faults).__aenter__()

        self.capacity = num_blocks * 16
        self.cluster: VirtualCluster = self.runner.run(enter())

    @rule(
        num_tokens=st.integers(1, 150),
        max_tokens=st.integers(1, 60),
        temperature=st.sampled_from([0.0, 0.8]),
        is_known=st.booleans(),
        num_choices=st.sampled_from([1, 1, 1, 3]),
        priority=st.sampled_from([0, 0, -1, 5]),
    )
    def ask(
        self,
        num_tokens: int,
        max_tokens: int,
        temperature: float,
        is_known: bool,
        num_choices: int,
        priority: int,
    ) -> None:
        num_tokens = min(num_tokens, self.capacity - max_tokens - 17)
        draw = self.cluster.random.randrange
        prompt = [7 + i % 50 if is_known else draw(VOCAB) for i in range(num_tokens)]
        stop_ids = (draw(VOCAB),)
        choices = [
            SamplingParams(
                max_tokens, temperature, seed=draw(2**60), stop_token_ids=stop_ids, priority=priority
            )
            for _ in range(num_choices)
        ]
        tasks = self._spawn(prompt, choices)
        self.requests += [(task, prompt, params) for task, params in zip(tasks, choices, strict=True)]
        self.advance(0.0)

    def _spawn(self, prompt: list[int], choices: list[SamplingParams]) -> list[asyncio.Task[list[int]]]:
        async def refuse(error: TandemError) -> list[int]:
            raise error

        async def spawn() -> list[asyncio.Task[list[int]]]:
            try:
                generations = self.cluster.begin(prompt, choices)
            except TandemError as error:
                return [asyncio.create_task(refuse(error)) for _ in choices]
            return [asyncio.create_task(self.cluster.take(generation)) for generation in generations]

        return self.runner.run(spawn())

    @rule(duration_s=st.sampled_from([0.0, 0.003, 0.02, 0.1, 0.5, 2.0]))
    def advance(self, duration_s: float) -> None:
        self.runner.run(asyncio.sleep(duration_s))

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 1000))
    def leave(self, which: int) -> None:
        index = which % len(self.requests)
        if not self.requests[index][0].done():
            self.left.add(index)
            self.requests[index][0].cancel()
            TOTALS["client left"] += 1

    @rule(name=st.sampled_from([*NAMES[Role.PREFILL], *NAMES[Role.DECODE]]))
    def crash(self, name: str) -> None:
        if name in self.cluster.workers:
            self.runner.run(self.cluster.crash(name))
            TOTALS["crash"] += 1

    @rule(name=st.sampled_from([*NAMES[Role.PREFILL], *NAMES[Role.DECODE]]))
    def start_again(self, name: str) -> None:
        if name not in self.cluster.workers:
            self.runner.run(self.cluster.start_worker(Role(name.split("-")[0]), name))

    @rule(name=st.sampled_from([*NAMES[Role.PREFILL], *NAMES[Role.DECODE]]), is_slow=st.booleans())
    def pause(self, name: str, is_slow: bool) -> None:
        worker = self.cluster.workers.get(name)
        if worker is not None:
            worker.engine.running.clear() if not is_slow else None
            worker.delay_s = 1.0 if is_slow else 0.001
            TOTALS["delayed" if is_slow else "pause"] += 1

    @rule()
    def resume_all(self) -> None:
        for worker in self.cluster.workers.values():
            worker.engine.running.set()
            worker.delay_s = 0.001

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        try:
            self._settle()
        finally:
            TOTALS["steps"] += self.cluster.num_steps
            self.runner.run(self.cluster.__aexit__())
            self.runner.close()

    def _settle(self) -> None:
        """Heal everything, let every request end, then look."""
        self.resume_all()
        for names in NAMES.values():
            for name in names:
                self.start_again(name)
        results = self.runner.run(self._wait_all())
        for index, (result, (_, prompt, params)) in enumerate(zip(results, self.requests, strict=True)):
            self._check_one(result, expected_tokens(prompt, params), index in self.left)
        self.runner.run(asyncio.sleep(10))
        assert not self.cluster.orchestrator.live
        for name, worker in self.cluster.workers.items():
            assert worker.is_idle, (name, worker.pool.counts, worker.service.num_handoffs)
            for task in (*worker.tasks, worker.engine._task):
                assert not task.done(), f"{name}: {task!r}"
        for link in self.cluster.fleet.links:
            assert link.num_open == 0
            assert link.row.num_pending_tokens == 0

    async def _wait_all(self) -> list[object]:
        async with asyncio.timeout(SETTLE_S):
            return await asyncio.gather(*(task for task, _, _ in self.requests), return_exceptions=True)

    @staticmethod
    def _check_one(result: object, expected: list[int], has_left: bool) -> None:
        if isinstance(result, asyncio.CancelledError):
            assert has_left
        elif isinstance(result, TandemError):
            TOTALS[type(result).__name__] += 1
            assert isinstance(result, EXPLAINED), repr(result)
        elif isinstance(result, BaseException):
            raise result
        else:
            TOTALS["right"] += 1
            assert result == expected


def run(num_steps: int) -> None:
    """Histories from seeds 1, 2, ... until there were enough steps."""
    TOTALS.clear()
    phases = (Phase.generate, Phase.shrink) if SHRINKS else (Phase.generate,)
    harm = settings(
        max_examples=30,
        stateful_step_count=40,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
    logging.disable(logging.WARNING)
    try:
        for number in itertools.count(1):
            run_state_machine_as_test(seed(number)(ClusterUnderHarm), settings=harm)
            if TOTALS["steps"] >= num_steps:
                break
    finally:
        logging.disable(logging.NOTSET)
    assert min(TOTALS["right"], TOTALS["crash"], TOTALS["client left"], TOTALS["pause"]) > 10, TOTALS


@pytest.mark.parametrize(
    ("faults", "most_attempts"),
    [
        (Faults(reorders=True), 1),
        (Faults(duplicates=True, every=2), 2),
        (Faults(drops_run=True, every=2), 2),
        (Faults(seal_first=True, every=2), 2),
    ],
)
def test_blocks_in_disorder_cost_at_most_another_attempt(faults: Faults, most_attempts: int) -> None:
    async def main() -> None:
        async with VirtualCluster(1, num_prefill=1, num_decode=1, faults={"prefill-0": faults}) as cluster:
            for number in range(6):
                prompt, params = [number] * (10 + 25 * number), SamplingParams(8, 0.0)
                request = GenerationRequest(tuple(prompt), params, (), 60.0)
                (generation,) = cluster.orchestrator.begin([request])
                tokens = [token.token_id async for token in generation.tokens()]
                assert tokens == expected_tokens(prompt, params)
                assert generation.report.num_attempts <= most_attempts
                num_attempts.append(generation.report.num_attempts)

    num_attempts: list[int] = []
    run_virtually(main())
    assert max(num_attempts) == most_attempts


@pytest.mark.timeout(600)
def test_a_cluster_under_harm_20_000_steps() -> None:
    run(20_000)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_cluster_under_harm_1_000_000_steps() -> None:
    run(1_000_000)
