"""The decode tier for tests that play its engine process and the connector, and write the KV."""

from collections.abc import Sequence as Seq

from core.clock import VirtualClock
from core.grant import FirstToken
from core.ids import HandoffId, RequestId
from core.sampling import SamplingParams
from decode_service.scheduler import (
    DecodeTier,
    Reservation,
)
from engine.block_pool import BlockPool
from engine.config import MAX_LOCAL_TOKENS
from engine.engine import Engine
from engine.hash_runner import HashRunner, expected_outputs
from engine.messages import (
    Activate,
    AnyCommand,
    AnyEvent,
    Reserve,
    Reserved,
    Token,
    WorkFailed,
)
from engine.scheduler import MAX_PREEMPTIONS, Sampled, Scheduler, SchedulerLimits, Work
from engine.sequence import Sequence

BLOCK, CONTEXT = 16, 1600


class Runner(HashRunner):
    """As told: raises, or draws from logits that are not finite for one id."""

    error: Exception | None = None
    not_finite: HandoffId | None = None

    def run(self, work: Seq[Work]) -> dict[HandoffId, Sampled]:
        sampled = super().run(work)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return {key: s._replace(is_valid=key != self.not_finite) for key, s in sampled.items()}

    def receive(self, reserve: Reserve, reserved: Reserved, table: Seq[int]) -> None:
        """Write the prompt's KV into the granted blocks, as a transfer does."""
        tokens = [*reserve.prompt_ids, *reserve.output_ids]
        sequence = Sequence(reserve.id, tokens, len(reserve.prompt_ids), reserve.params, "model")
        sequence.block_ids = list(table)
        sequence.num_computed = reserved.num_cached_tokens
        if sequence.num_to_compute:
            super().run([Work(sequence, sequence.num_to_compute)])


class Rig:
    def __init__(
        self,
        num_blocks: int = 24,
        token_budget: int = 32,
        max_batch: int = 4,
        max_local_tokens: int = MAX_LOCAL_TOKENS,
    ) -> None:
        self.clock = VirtualClock()
        self.pool = BlockPool(num_blocks)
        self.runner = Runner(num_blocks, BLOCK)
        limits = SchedulerLimits(BLOCK, token_budget, max_batch, CONTEXT)
        engine = Engine(Scheduler(limits, self.pool, self.clock), self.runner)
        self.tier = DecodeTier(engine, "model", max_local_tokens)
        self.tokens: dict[HandoffId, list[int]] = {}

    def do(self, *commands: AnyCommand) -> list[AnyEvent]:
        for command in commands:
            self.tier.handle(command)
            self.pool.check()
        return self.take()

    def take(self) -> list[AnyEvent]:
        events, self.tier.events = self.tier.events, []
        for event in events:
            if isinstance(event, Token):
                self.tokens[event.id].append(event.token_id)
        return events

    def step(self) -> list[AnyEvent]:
        try:
            self.tier.step()
        except RuntimeError as error:
            self.tier.fail_step(error)
        self.pool.check()
        scheduler = self.tier.engine.scheduler
        assert len(scheduler.running) + scheduler.num_reserved_places <= scheduler.limits.max_batch
        assert all(s.num_forced <= MAX_PREEMPTIONS for s in (*scheduler.waiting, *scheduler.running))
        return self.take()

    def run(self, max_steps: int = 1000) -> list[AnyEvent]:
        events: list[AnyEvent] = []
        for _ in range(max_steps):
            new = self.step()
            if not new and not self.tier.engine.work:
                return events
            events += new
        raise AssertionError("not done")

    def reserve(self, command: Reserve) -> Reserved:
        """What is granted at once."""
        self.tier.handle(command)
        (reserved,) = [event for event in self.step() if event.id == command.id]
        assert isinstance(reserved, Reserved), reserved
        return reserved

    def activate(self, command: Reserve, reserved: Reserved) -> None:
        """Transfer the KV, verify, go."""
        self.runner.receive(command, reserved, self._table(command.id))
        position = len(command.output_ids)
        first = expected(command)[position]
        self.tokens[command.id] = [first]
        self.do(Activate(command.id, [FirstToken(0, position, first, -1.0)]))

    def _table(self, handoff_id: HandoffId) -> list[int]:
        reservation: Reservation = self.tier._reserved[handoff_id]
        return reservation.sequence.block_ids

    def is_idle(self) -> bool:
        scheduler = self.tier.engine.scheduler
        is_empty = not self.tier.num_waiting and not scheduler.running and not scheduler.num_reserved_places
        return is_empty and self.pool.num_available == self.pool.num_blocks


def id_of(number: int) -> HandoffId:
    return HandoffId(RequestId(str(number)), 1)


def reserve(
    number: int,
    prompt: Seq[int],
    max_tokens: int = 8,
    wait_s: float = 0.0,
    credit: int = 256,
    output: Seq[int] = (),
    is_local: bool = False,
    **params: object,
) -> Reserve:
    sampling = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **params})
    return Reserve(id_of(number), list(prompt), list(output), sampling, wait_s, credit, is_local)


def expected(command: Reserve) -> list[int]:
    return expected_outputs(command.prompt_ids, command.params, CONTEXT)


def codes(events: list[AnyEvent]) -> dict[HandoffId, str]:
    return {event.id: event.code for event in events if isinstance(event, WorkFailed)}
