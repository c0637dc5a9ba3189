"""Preemption under traffic: bounded for each request, and everybody ends."""

import random
from collections import Counter
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from core.ids import HandoffId
from engine.messages import (
    AbortWork,
    AnyEvent,
    Credit,
    Reserve,
    Reserved,
    Token,
    WorkFailed,
)
from engine.scheduler import MAX_PREEMPTIONS
from tests.decode_service.rig import BLOCK, Rig, expected, reserve


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
