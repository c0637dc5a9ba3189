"""The decode tier as its engine process drives it. The tests play the connector and write the KV."""

import random
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.block_hash import hash_chain
from core.clock import VirtualClock
from core.errors import ErrorCode
from core.grant import FirstToken
from core.ids import HandoffId, RequestId
from core.sampling import SamplingParams
from decode_service.scheduler import (
    MAX_LOCAL_TOKENS,
    MAX_QUEUED_RESERVES,
    SUSPEND_LIMIT_S,
    DecodeTier,
    Reservation,
)
from engine.block_pool import BlockPool, BlockState
from engine.engine import Engine
from engine.hash_runner import HashRunner, expected_outputs
from engine.messages import (
    AbortWork,
    Activate,
    AnyCommand,
    AnyEvent,
    Credit,
    Quiet,
    Reserve,
    Reserved,
    Token,
    WorkAborted,
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
    def __init__(self, num_blocks: int = 24, token_budget: int = 32, max_batch: int = 4) -> None:
        self.clock = VirtualClock()
        self.pool = BlockPool(num_blocks)
        self.runner = Runner(num_blocks, BLOCK)
        limits = SchedulerLimits(BLOCK, token_budget, max_batch, CONTEXT)
        self.tier = DecodeTier(Engine(Scheduler(limits, self.pool, self.clock), self.runner), "model")
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


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 40, 48])
def test_a_reserved_activated_prompt_decodes_to_its_end(num_tokens):
    rig = Rig()
    command = reserve(1, range(num_tokens))
    reserved = rig.reserve(command)
    assert len(reserved.block_ids) == -(-num_tokens // BLOCK)
    assert reserved.num_tokens == num_tokens
    chain = hash_chain(range(num_tokens), "model")
    assert reserved.chain_hash == (chain[-1] if chain else b"")
    rig.activate(command, reserved)
    tokens = rig.run()
    assert rig.tokens[id_of(1)] == expected(command)
    assert [event.position for event in tokens] == list(range(1, 8))
    assert [event.finish_reason for event in tokens] == [""] * 6 + ["length"]
    assert rig.is_idle()


def test_nothing_is_decoded_before_the_seal_is_verified():
    rig = Rig()
    rig.reserve(reserve(1, range(40)))
    assert rig.step() == []
    assert rig.pool.counts[BlockState.IN_FLIGHT] == 3
    assert rig.tier.engine.scheduler.num_free_places == 3


def test_what_is_cached_need_not_be_sent():
    rig = Rig()
    first = reserve(1, range(48))
    rig.activate(first, rig.reserve(first))
    rig.run()
    again = reserve(2, range(48))
    reserved = rig.reserve(again)
    assert (reserved.num_cached_tokens, reserved.block_ids) == (48, [])
    rig.activate(again, reserved)
    rig.run()
    assert rig.tokens[id_of(2)] == expected(again)
    longer = reserve(3, [*range(40), 7, 7])
    assert rig.reserve(longer).num_cached_tokens == 32


def test_blocks_in_flight_are_not_found_by_others():
    rig = Rig()
    rig.reserve(reserve(1, range(48)))
    assert rig.reserve(reserve(2, range(48))).num_cached_tokens == 0


def test_a_continuation_goes_on_at_its_own_position():
    whole = reserve(1, range(20), 10, temperature=0.9, seed=3)
    outputs = expected(whole)
    rig = Rig()
    command = reserve(2, range(20), 10, output=outputs[:4], temperature=0.9, seed=3)
    rig.activate(command, rig.reserve(command))
    tokens = rig.run()
    assert [event.position for event in tokens] == [5, 6, 7, 8, 9]
    assert rig.tokens[id_of(2)] == outputs[4:]


def test_without_room_a_reserve_that_may_not_wait_is_refused_at_once():
    rig = Rig(num_blocks=8)
    rig.reserve(reserve(1, range(100)))
    events = rig.do(reserve(2, range(50))) + rig.step()
    assert codes(events) == {id_of(2): ErrorCode.BUSY}


def test_a_reserve_waits_for_room_in_a_queue_that_holds_nothing():
    rig = Rig(num_blocks=8)
    rig.reserve(reserve(1, range(100)))
    rig.do(reserve(2, range(50, 100), wait_s=30.0))
    assert rig.step() == []
    assert rig.tier.num_waiting == 1
    rig.clock.advance(29.9)
    assert rig.step() == []
    events = rig.do(AbortWork(id_of(1))) + rig.step()
    assert [type(event) for event in events] == [WorkAborted, Reserved]


def test_a_reserve_that_waited_long_enough_is_refused():
    rig = Rig(num_blocks=8)
    rig.reserve(reserve(1, range(100)))
    rig.do(reserve(2, range(50, 100), wait_s=30.0), reserve(3, range(50, 100), wait_s=10.0))
    rig.step()
    rig.clock.advance(10.0)
    assert codes(rig.step()) == {id_of(3): ErrorCode.BUSY}
    rig.clock.advance(20.0)
    assert codes(rig.step()) == {id_of(2): ErrorCode.BUSY}
    assert rig.tier.num_waiting == 0


def test_the_queue_is_bounded():
    rig = Rig(num_blocks=8)
    rig.reserve(reserve(1, range(100)))
    events = rig.do(
        *(reserve(2 + number, range(50), wait_s=9.0) for number in range(MAX_QUEUED_RESERVES + 2))
    )
    assert list(codes(events).values()) == [ErrorCode.BUSY] * 2


def test_places_are_taken_by_reserves_too():
    rig = Rig(max_batch=2)
    for number in (1, 2):
        rig.reserve(reserve(number, [number]))
    assert codes(rig.do(reserve(3, [3])) + rig.step()) == {id_of(3): ErrorCode.BUSY}


def test_a_grant_leaves_a_free_block_for_each_running_sequence():
    rig = Rig(num_blocks=8)
    running = reserve(1, range(15), max_tokens=60)
    rig.activate(running, rig.reserve(running))
    assert codes(rig.do(reserve(2, range(100, 196))) + rig.step()) == {id_of(2): ErrorCode.BUSY}
    rig.reserve(reserve(3, range(100, 180)))
    rig.run()
    assert rig.tokens[id_of(1)] == expected(running)[:18], "that block held 16 more"


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens"), [(0, 4), (8 * BLOCK, 1), (CONTEXT, 1), (20, 8 * BLOCK - 19), (100, 1000)]
)
def test_what_could_never_be_served_to_its_end_is_refused(prompt_len, max_tokens):
    rig = Rig(num_blocks=8)
    events = rig.do(reserve(1, range(prompt_len), max_tokens, wait_s=30.0))
    assert codes(events) == {id_of(1): ErrorCode.INVALID}
    assert rig.is_idle()


def test_an_output_may_fill_the_pool_to_the_last_token():
    rig = Rig(num_blocks=8)
    command = reserve(1, range(20), 8 * BLOCK - 20)
    rig.activate(command, rig.reserve(command))
    rig.run()
    assert rig.tokens[id_of(1)] == expected(command)
    assert len(expected(command)) == 108


def test_a_repeated_reserve_changes_nothing_at_any_stage():
    rig = Rig(num_blocks=8)
    blocker = rig.reserve(reserve(9, range(100)))
    assert blocker.block_ids
    command = reserve(1, range(20), wait_s=30.0)
    assert rig.do(command, command) == []
    rig.do(AbortWork(id_of(9)))
    (reserved,) = rig.step()
    assert rig.do(command) + rig.step() == []
    rig.activate(command, reserved)
    assert rig.do(command) == []
    rig.run()
    assert rig.tokens[id_of(1)] == expected(command)
    assert rig.is_idle()


def test_an_abort_returns_the_blocks_of_every_stage():
    rig = Rig()
    running, reserved = reserve(1, range(40), 200), reserve(2, range(40))
    rig.activate(running, rig.reserve(running))
    rig.step()
    rig.reserve(reserved)
    rig.do(reserve(3, range(40)))
    assert rig.do(*(AbortWork(id_of(number)) for number in (3, 2, 1, 1))) == [
        WorkAborted(id_of(number)) for number in (3, 2, 1, 1)
    ]
    assert rig.run() == []
    assert rig.is_idle()


def test_blocks_that_a_writer_may_touch_are_quarantined_until_it_is_quiet():
    rig = Rig()
    warm = reserve(1, range(32))
    rig.activate(warm, rig.reserve(warm))
    rig.run()
    reserved = rig.reserve(reserve(2, range(70)))
    assert reserved.num_cached_tokens == 32
    rig.do(AbortWork(id_of(2), is_quiet=False))
    assert rig.pool.counts[BlockState.QUARANTINED] == len(reserved.block_ids) == 3
    assert rig.pool.num_available == rig.pool.num_blocks - 3
    taken = rig.pool.allocate(rig.pool.num_available)
    assert not set(taken) & set(reserved.block_ids)
    rig.pool.release(taken)
    rig.do(AbortWork(id_of(2)), Quiet(id_of(2)), Quiet(id_of(2)))
    assert rig.is_idle()


def test_commands_after_the_end_are_harmless():
    rig = Rig()
    command = reserve(1, range(20))
    rig.activate(command, rig.reserve(command))
    rig.run()
    late = [Credit(id_of(1), 5), Activate(id_of(1), [FirstToken(0, 0, 1, 0.0)]), Quiet(id_of(1))]
    assert rig.do(*late) == []
    assert rig.run() == []
    assert rig.is_idle()
    rig.reserve(reserve(2, range(20)))
    rig.do(AbortWork(id_of(2)))
    assert rig.do(Activate(id_of(2), [FirstToken(0, 0, 1, 0.0)]), Credit(id_of(2), 5)) == []
    assert rig.is_idle()


def test_credit_holds_one_stream_back_and_no_other():
    rig = Rig()
    slow, other = reserve(1, range(20), 12, credit=2), reserve(2, range(50, 70), 12)
    for command in (slow, other):
        rig.activate(command, rig.reserve(command))
    rig.run()
    assert len(rig.tokens[id_of(1)]) == 3
    assert rig.tokens[id_of(2)] == expected(other)
    rig.do(Credit(id_of(1), 100))
    rig.run()
    assert rig.tokens[id_of(1)] == expected(slow)


def test_credit_that_comes_before_the_seal_counts():
    rig = Rig()
    command = reserve(1, range(20), credit=1)
    reserved = rig.reserve(command)
    rig.do(Credit(id_of(1), 100))
    rig.activate(command, reserved)
    rig.run()
    assert rig.tokens[id_of(1)] == expected(command)


@pytest.mark.parametrize("credit", [0, 3])
def test_a_stream_whose_reader_takes_nothing_for_too_long_is_ended(credit):
    rig = Rig()
    command = reserve(1, range(20), 100, credit=credit)
    rig.activate(command, rig.reserve(command))
    rig.run()
    rig.clock.advance(SUSPEND_LIMIT_S - 1)
    rig.do(Credit(id_of(1), 1))
    rig.run()
    rig.clock.advance(SUSPEND_LIMIT_S - 1)
    assert rig.step() == []
    rig.clock.advance(1)
    assert codes(rig.step()) == {id_of(1): ErrorCode.DEADLINE}
    assert rig.is_idle()
    assert rig.do(Credit(id_of(1), 1)) == []


def test_preempted_streams_go_first_and_new_reserves_do_not_starve_them():
    rig = Rig(num_blocks=12, max_batch=3)
    pair = [reserve(number, [number] * 60, 90) for number in (1, 2)]
    for command in pair:
        rig.activate(command, rig.reserve(command))
    number, num_reserved = 10, 0
    for _ in range(400):
        number += 1
        events = rig.do(reserve(number, [number])) + rig.step()
        num_reserved += sum(isinstance(event, Reserved) for event in events)
        rig.do(AbortWork(id_of(number)))
        if all(len(rig.tokens[command.id]) == 90 for command in pair):
            break
    assert [rig.tokens[command.id] for command in pair] == [expected(command) for command in pair]
    assert num_reserved > 0


def test_logits_that_are_not_finite_fail_only_their_stream():
    rig = Rig()
    pair = [reserve(number, range(20)) for number in (1, 2)]
    for command in pair:
        rig.activate(command, rig.reserve(command))
    rig.step()
    rig.runner.not_finite = id_of(1)
    assert codes(rig.run()) == {id_of(1): ErrorCode.ENGINE}
    assert rig.tokens[id_of(2)] == expected(pair[1])
    assert rig.is_idle()


def test_a_step_that_raises_fails_those_that_it_computed_and_no_reserve():
    rig = Rig()
    pair = [reserve(number, range(20)) for number in (1, 2)]
    for command in pair:
        rig.activate(command, rig.reserve(command))
    later = reserve(3, range(20))
    reserved = rig.reserve(later)
    rig.runner.error = RuntimeError("no memory")
    failed = codes(rig.step())
    assert failed == {id_of(1): ErrorCode.ENGINE, id_of(2): ErrorCode.ENGINE}
    rig.activate(later, reserved)
    rig.run()
    assert rig.tokens[id_of(3)] == expected(later)
    assert rig.is_idle()


def test_a_prompt_is_computed_here_in_chunks_between_the_others_tokens():
    rig = Rig(num_blocks=24, token_budget=16)
    stream, local = reserve(1, range(20), 12), reserve(2, range(100, 150), 6, is_local=True)
    rig.activate(stream, rig.reserve(stream))
    rig.tokens[id_of(2)] = []
    assert rig.do(local) == []
    events = [event for _ in range(4) for event in rig.step()]
    assert [event.id for event in events] == [id_of(1)] * 4 + [id_of(2)]
    rig.run()
    assert [rig.tokens[command.id] for command in (stream, local)] == [expected(stream), expected(local)]
    assert rig.is_idle()


def test_only_a_short_prompt_is_computed_here_unless_it_is_cached():
    rig = Rig(num_blocks=24)
    limits = rig.tier.engine.scheduler.limits
    rig.tier.engine.scheduler.limits = replace(limits, context_len=4000)
    big = BlockPool(200)
    rig.pool = rig.tier.engine.scheduler.pool = big
    long = reserve(1, range(MAX_LOCAL_TOKENS + 1), is_local=True)
    assert codes(rig.do(long)) == {id_of(1): ErrorCode.BUSY}
    for block_hash in hash_chain(range(MAX_LOCAL_TOKENS), "model"):
        (block,) = big.allocate(1)
        big.register(block, block_hash)
        big.release([block])
    assert rig.do(reserve(2, range(MAX_LOCAL_TOKENS + 1), is_local=True)) == []
    rig.do(AbortWork(id_of(2)))
    assert rig.is_idle()


def test_without_a_place_a_local_prompt_is_refused_at_once():
    rig = Rig(max_batch=1)
    rig.reserve(reserve(1, range(20)))
    assert codes(rig.do(reserve(2, range(20), is_local=True))) == {id_of(2): ErrorCode.BUSY}


class Arrival(NamedTuple):
    """One request of a traffic: what it is, when its transfer and its reader are done with what they do."""

    num_prompt_tokens: int
    max_tokens: int
    credit: int = 1 << 20
    leaves_after: int = 1 << 30
    transfer_steps: int = 3


class Traffic:
    """Requests that arrive, are transferred, read (those short of credit every seventh step) and left; steps."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.commands: list[Reserve] = []
        self.arrivals: list[Arrival] = []
        self.due: dict[int, list[tuple[Reserve, Reserved]]] = {}
        self.ended_at: dict[HandoffId, int] = {}
        self.left: set[HandoffId] = set()
        self.num_preemptions: Counter[HandoffId] = Counter()
        self.num_steps = 0

    def arrive(self, arrival: Arrival) -> HandoffId:
        number = len(self.commands)
        prompt = [number] * arrival.num_prompt_tokens
        command = reserve(
            number, prompt, arrival.max_tokens, 1e9, arrival.credit, seed=number, temperature=0.5
        )
        self.commands.append(command)
        self.arrivals.append(arrival._replace(leaves_after=self.num_steps + arrival.leaves_after))
        self._see(self.rig.do(command))
        return command.id

    def step(self) -> None:
        self.num_steps += 1
        for command, reserved in self.due.pop(self.num_steps, []):
            if command.id not in self.left:
                self.rig.activate(command, reserved)
        for command, arrival in zip(self.commands, self.arrivals, strict=True):
            if arrival.leaves_after == self.num_steps and command.id not in self.ended_at:
                self.left.add(command.id)
                self.rig.do(AbortWork(command.id))
            elif arrival.credit < 9 and self.num_steps % 7 == 0:
                self.rig.do(Credit(command.id, arrival.credit))
        self._see(self.rig.step())
        self.rig.clock.advance(0.01)

    def run(self, max_steps: int) -> None:
        while len(self.ended_at) + len(self.left) < len(self.commands):
            assert self.num_steps < max_steps, "not done"
            self.step()

    def check(self) -> None:
        """Whatever was asked for and not left is whole, and nothing is left over."""
        assert self.rig.is_idle()
        for command, arrival in zip(self.commands, self.arrivals, strict=True):
            if command.id not in self.left:
                assert self.rig.tokens[command.id] == expected(command)
            if arrival.credit >= arrival.max_tokens:
                assert self.num_preemptions[command.id] <= MAX_PREEMPTIONS

    def _see(self, events: list[AnyEvent]) -> None:
        for event in events:
            match event:
                case Reserved():
                    (command,) = [command for command in self.commands if command.id == event.id]
                    steps = self.arrivals[self.commands.index(command)].transfer_steps
                    self.due.setdefault(self.num_steps + steps, []).append((command, event))
                case Token():
                    self.num_preemptions[event.id] = event.num_preemptions
                    if event.finish_reason:
                        self.ended_at[event.id] = self.num_steps
                case WorkFailed():
                    raise AssertionError(event)


def test_a_long_request_under_steady_load_is_preempted_three_times_at_most_and_ends_in_twice_its_time():
    """Older ones that grow and end one by one let it in and out; shorter ones keep nine tenths of the pool in use."""
    rig, rng = Rig(num_blocks=100, token_budget=256, max_batch=64), random.Random(1)
    traffic = Traffic(rig)
    for number in range(20):
        traffic.arrive(Arrival(16, 60 + 20 * number))
    for _ in range(12):
        traffic.step()
    num_tokens = 1400
    long = traffic.arrive(Arrival(100, num_tokens))
    while long not in traffic.ended_at:
        assert traffic.num_steps < 2 * num_tokens
        if rig.pool.num_available > 10 and rig.tier.num_waiting < 4:
            traffic.arrive(Arrival(rng.randrange(1, 100), rng.randrange(2, 64)))
        traffic.step()
    assert traffic.num_preemptions[long] > 1, "an easy life"
    assert len(traffic.ended_at) > 200, "others were kept out"
    traffic.run(traffic.num_steps + 500)
    traffic.check()


def draw_arrival(rng: random.Random, max_tokens: int) -> Arrival:
    """Some read slowly, some leave."""
    return Arrival(
        rng.randrange(1, 20),
        rng.randrange(2, max_tokens),
        rng.choice((1 << 20, 1 << 20, 1 << 20, 1 << 20, rng.choice((1, 4)))),
        rng.choice((1 << 30, 1 << 30, 1 << 30, 1 << 30, rng.randrange(1, 200))),
        rng.randrange(1, 9),
    )


@given(
    seed=st.integers(0, 1 << 32),
    num_requests=st.integers(10, 25),
    most_steps_between=st.integers(0, 4),
    num_blocks=st.integers(15, 25),
    max_batch=st.integers(4, 30),
)
@settings(max_examples=40, deadline=None)
def test_whoever_arrives_reads_slowly_or_leaves_readers_are_preempted_three_times_at_most_and_all_end(
    seed, num_requests, most_steps_between, num_blocks, max_batch
):
    rng, traffic = random.Random(seed), Traffic(Rig(num_blocks, 64, max_batch))
    for _ in range(num_requests):
        traffic.arrive(draw_arrival(rng, max_tokens=num_blocks * BLOCK - 20))
        for _ in range(rng.randint(0, most_steps_between)):
            traffic.step()
    traffic.run(20_000)
    traffic.check()


class Story:
    """Any order of commands, as a gateway with several requests may send them, with stale and repeated ones."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.reserves: dict[HandoffId, Reserve] = {}
        self.grants: dict[HandoffId, Reserved] = {}
        self.num_aborts = self.num_answers = 0
        self.ended: set[HandoffId] = set()

    def reserve(
        self, number: int, kind: int, length: int, max_tokens: int, wait_s: float, credit: int, is_local: bool
    ) -> None:
        command = reserve(number, [kind] * length, max_tokens, wait_s, credit, is_local=is_local)
        command = self.reserves.setdefault(command.id, command)
        if not self.rig.tier._is_known(command.id):  # for the tier an id that has ended is a new one
            self.rig.tokens[command.id] = []
        self._see(self.rig.do(self.reserves[command.id]))

    def activate(self, number: int) -> None:
        reserved = self.grants.pop(id_of(number), None)
        if reserved is None:
            self._see(self.rig.do(Activate(id_of(number), [FirstToken(0, 0, 1, 0.0)])))
        else:
            self.rig.activate(self.reserves[id_of(number)], reserved)

    def credit(self, number: int, num_tokens: int) -> None:
        self._see(self.rig.do(Credit(id_of(number), num_tokens)))

    def abort(self, number: int, is_quiet: bool) -> None:
        self.num_aborts += 1
        self.grants.pop(id_of(number), None)
        self.ended.add(id_of(number))
        self._see(self.rig.do(AbortWork(id_of(number), is_quiet)))

    def quiet(self, number: int) -> None:
        self._see(self.rig.do(Quiet(id_of(number))))

    def step(self, count: int) -> None:
        for _ in range(count):
            self._see(self.rig.step())

    def fail(self) -> None:
        self.rig.runner.error = RuntimeError("told to")
        self.step(1)
        self.rig.runner.error = None

    def wait(self, duration_s: float) -> None:
        self.rig.clock.advance(duration_s)

    def _see(self, events: list[AnyEvent]) -> None:
        for event in events:
            match event:
                case Reserved():
                    self.grants[event.id] = event
                case WorkFailed():
                    self.ended.add(event.id)
                case WorkAborted():
                    self.num_answers += 1

    def finish(self) -> None:
        """Everything that may still happen does: writers fall quiet, readers take all, transfers succeed."""
        for number in range(5):
            self.quiet(number)
        for _ in range(300):
            for number in range(5):
                self.credit(number, 100)
                if id_of(number) in self.grants:
                    self.activate(number)
            self.step(1)
            self.wait(0.1)
            if self.rig.is_idle():
                return
        raise AssertionError("not done")

    def check_tokens(self) -> None:
        for handoff_id, tokens in self.rig.tokens.items():
            whole = expected(self.reserves[handoff_id])
            assert tokens == whole[: len(tokens)]


NUMBER = st.integers(0, 4)
ACTIONS = st.one_of(
    st.tuples(
        st.just(Story.reserve),
        NUMBER,
        st.integers(0, 1),
        st.integers(0, 60),
        st.integers(2, 60),
        st.sampled_from([0.0, 5.0]),
        st.sampled_from([0, 3, 256]),
        st.booleans(),
    ),
    st.tuples(st.just(Story.activate), NUMBER),
    st.tuples(st.just(Story.activate), NUMBER),
    st.tuples(st.just(Story.credit), NUMBER, st.integers(0, 9)),
    st.tuples(st.just(Story.abort), NUMBER, st.booleans()),
    st.tuples(st.just(Story.quiet), NUMBER),
    st.tuples(st.just(Story.step), st.integers(1, 5)),
    st.tuples(st.just(Story.fail)),
    st.tuples(st.just(Story.wait), st.sampled_from([1.0, 30.0])),
)


@given(actions=st.lists(ACTIONS, max_size=50), num_blocks=st.integers(6, 14), max_batch=st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_in_any_order_of_commands_and_faults_each_stream_ends_with_its_own_tokens(
    actions, num_blocks, max_batch
):
    rig = Rig(num_blocks, 24, max_batch)
    story = Story(rig)
    for action, *arguments in actions:
        action(story, *arguments)
        story.check_tokens()
    story.finish()
    story.check_tokens()
    for handoff_id, command in story.reserves.items():
        assert handoff_id in story.ended or rig.tokens[handoff_id] == expected(command)
    assert story.num_answers == story.num_aborts


@given(actions=st.lists(ACTIONS, max_size=50), num_blocks=st.integers(6, 14), max_batch=st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_aborting_everything_at_any_moment_leaves_every_block_free(actions, num_blocks, max_batch):
    rig = Rig(num_blocks, 24, max_batch)
    story = Story(rig)
    for action, *arguments in actions:
        action(story, *arguments)
    for number in range(5):
        story.abort(number, is_quiet=number % 2 == 0)
        story.quiet(number)
    assert rig.run() == []
    assert rig.is_idle()
