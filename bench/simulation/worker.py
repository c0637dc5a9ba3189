"""A simulated worker: the tier, scheduler and block pool of a real one, whose steps take what a profile says.

commands ─► inbox          step begins: schedule, announce          step ends: events, load
              └──────────────────┴── step_s ──────────────────────────┘
                                 └── many at once, until a command comes ──┘   (a leap)
"""

from collections.abc import Callable, Sequence
from functools import partial

from bench.simulation.costs import HostCosts, LinkCosts
from bench.simulation.events import Timeline
from bench.simulation.host import Company, Place, Stretch
from core.ids import BlockHash, HandoffId
from core.load import Load
from core.worker import Role, WorkerRecord
from decode_service.scheduler import DecodeTier
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.leap import leap, num_steady_steps
from engine.messages import AnyCommand, AnyEvent, Reserve, StartPrompt
from engine.pace import Pace
from engine.scheduler import Sampled, Scheduler, SchedulerLimits, Work
from engine.sequence import Sequence as EngineSequence
from prefill_service.scheduler import PrefillTier

TOKEN = Sampled(1, 0.0, True)
ChainOf = Callable[[HandoffId], list[BlockHash]]


class WorkerClock:
    """The timeline's, but for a worker that is in the middle of a step: that has run ahead to its end."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return self._timeline.now_s + self.ahead_s


class StepMeter:
    """Where a runner stands: computes nothing, and has the clock say that it took what a profile says."""

    def __init__(self, costs: HostCosts, link: LinkCosts, clock: WorkerClock) -> None:
        self.clock = clock
        self._costs = {
            Company.ALONE: costs.alone,
            Company.HELPED: costs.helped,
            Company.CONTENDED: costs.contended,
        }
        self._link = link
        self._latest = (0, 0, 0.0, 0.0)

    def run(self, work: Sequence[Work]) -> dict[HandoffId, Sampled]:
        prefill_keys = decode_keys = 0.0
        sampled = {}
        for item in work:
            sequence = item.sequence
            if item.num_tokens == 1:
                decode_keys += sequence.num_computed + 1
            else:
                prefill_keys += item.num_tokens * (sequence.num_computed + 0.5 * (item.num_tokens + 1))
            if item.needs_token:
                sampled[sequence.id] = TOKEN
        num_tokens = sum(item.num_tokens for item in work)
        self._latest = (num_tokens, len(sampled), prefill_keys, decode_keys)
        self.clock.ahead_s = self.step_s(*self._latest)
        return sampled

    def step_s(
        self,
        num_tokens: int,
        num_sampled: int,
        prefill_keys: float,
        decode_keys: float,
        company: Company = Company.ALONE,
    ) -> float:
        """From the start of one step to that of the next."""
        step_s = self._costs[company].step_s(num_tokens, num_sampled, prefill_keys, decode_keys)
        return step_s + self._link.step_overhead_s + self._link.token_overhead_s * num_sampled

    def durations_s(self) -> dict[Company, float]:
        """Of the latest step."""
        return {company: self.step_s(*self._latest, company) for company in Company}

    @property
    def decode_key_s(self) -> float:
        return self._costs[Company.ALONE].decode_key_s


def make_tier(
    record: WorkerRecord, limits: SchedulerLimits, pool: BlockPool, meter: StepMeter, chain_of: ChainOf
) -> PrefillTier | DecodeTier:
    """A real tier over a meter. Prompts' hashes are asked for, not computed: the tokens are made up anyway."""
    scheduler = Scheduler(limits, pool, meter.clock)
    engine = Engine(scheduler, meter)
    fingerprint = record.kv_spec.fingerprint
    if record.role is Role.PREFILL:
        return _PrefillTier(engine, fingerprint, chain_of)
    return _DecodeTier(engine, fingerprint, record.max_local_tokens, chain_of)


class _PrefillTier(PrefillTier):
    def __init__(self, engine: Engine, fingerprint: str, chain_of: ChainOf) -> None:
        super().__init__(engine, fingerprint)
        self._chain_of = chain_of

    def make_sequence(self, command: StartPrompt) -> EngineSequence:
        sequence = super().make_sequence(command)
        sequence.know_chain(self._chain_of(command.id))
        return sequence


class _DecodeTier(DecodeTier):
    def __init__(self, engine: Engine, fingerprint: str, max_local_tokens: int, chain_of: ChainOf) -> None:
        super().__init__(engine, fingerprint, max_local_tokens)
        self._chain_of = chain_of

    def make_sequence(self, command: Reserve) -> EngineSequence:
        sequence = super().make_sequence(command)
        sequence.know_chain(self._chain_of(command.id))
        return sequence


OnEvents = Callable[["SimWorker", list[AnyEvent]], None]
OnTokens = Callable[["Leap", dict[HandoffId, int]], None]


class SimWorker:
    """One engine. `on_events` gets what a report tells, when it does; `on_tokens`, at the end of a leap, in
    how many of its first steps each sequence got a token."""

    def __init__(
        self,
        record: WorkerRecord,
        tier: PrefillTier | DecodeTier,
        meter: StepMeter,
        timeline: Timeline,
        on_events: OnEvents,
        on_tokens: OnTokens,
        place: Place | None = None,
        pace_s: float = 0.0,
    ) -> None:
        """With a `place` it has neighbours, and never leaps: any of its steps may be slower than the one before."""
        self.record = record
        self.tier = tier
        self.num_steps = 0
        self.busy_s = 0.0
        self._meter = meter
        self._timeline = timeline
        self._on_events = on_events
        self._on_tokens = on_tokens
        self._inbox: list[AnyCommand] = []
        self._is_busy = False
        self._leap: Leap | None = None
        self._is_decode = record.role is Role.DECODE
        self._place = place
        self._pace = Pace(pace_s, timeline, self._is_time_wanted, self._lend)
        self._is_resting = False
        tier.engine.on_scheduled = self._announce

    @property
    def load(self) -> Load:
        """As a report tells it, but for what nobody looks at here."""
        scheduler, engine = self.tier.engine.scheduler, self.tier.engine
        num_waiting = self.tier.num_waiting
        has_prompts = not self._is_decode or bool(scheduler.waiting) or self.record.is_colocated
        return Load(
            num_blocks=scheduler.pool.num_blocks,
            num_free_blocks=scheduler.pool.num_available,
            num_queued_tokens=scheduler.num_queued_tokens if has_prompts else 0,
            num_running=len(scheduler.running),
            num_waiting=num_waiting,
            step_s=engine.step_s,
            tokens_per_s=engine.tokens_per_s,
        )

    def send(self, command: AnyCommand) -> None:
        """A command arrives."""
        self._inbox.append(command)
        if not self._is_busy:
            self._step()
        elif self._leap is not None:
            self._cut_short(self._leap)
        elif self._is_resting:
            self._take_in()
            self.tier.prepare()
            self._tell()

    def _announce(self, work: list[Work]) -> None:
        self.tier.announce(work)
        self._tell()

    def _tell(self) -> None:
        events, self.tier.events = self.tier.events, []
        if events:
            self._on_events(self, events)

    def _take_in(self) -> None:
        inbox, self._inbox = self._inbox, []
        for command in inbox:
            self.tier.handle(command)

    def _step(self) -> None:
        """Take what came in, and begin a step if there is work for one."""
        self._take_in()
        self._is_resting = False
        scheduler = self.tier.engine.scheduler
        if not scheduler.running and not scheduler.waiting:
            self.tier.prepare()
            self._rest()
            return
        if self._is_decode and self._place is None and self._begin_leap():
            return
        self._pace.begin()
        did_work = self.tier.step()
        clock = self._meter.clock
        step_s, clock.ahead_s = clock.ahead_s, 0.0
        if not did_work:
            self._rest()
            return
        self._is_busy = True
        self.num_steps += 1
        self.busy_s += step_s
        events, self.tier.events = self.tier.events, []
        if self._place is None:
            self._timeline.after(step_s, self._end_step, events)
        else:
            self._set_place(is_busy=True)
            end = partial(self._end_step, events)
            Stretch(self._timeline, self._place, self._meter.durations_s(), end)

    def _rest(self) -> None:
        """There is nothing to compute."""
        self._is_busy = False
        self._set_place(is_busy=False)
        self._tell()

    def _end_step(self, events: list[AnyEvent]) -> None:
        self._on_events(self, events)
        left_s = self._pace.left_s
        if left_s:
            self._is_resting = True
            self._timeline.after(left_s, self._step)
        else:
            self._step()

    def _set_place(self, is_busy: bool, is_lent: bool = False) -> None:
        if self._place is not None:
            self._place.set_busy(is_busy, is_lent)

    def _is_time_wanted(self) -> bool:
        return self._place is not None and self._place.has_busy_neighbour

    def _lend(self) -> None:
        self._set_place(is_busy=False, is_lent=True)

    def _begin_leap(self) -> bool:
        """As many decode steps at once as nothing happens in."""
        self.tier.prepare()
        scheduler = self.tier.engine.scheduler
        num_steps = num_steady_steps(scheduler)
        if not num_steps:
            return False
        self._tell()
        running = scheduler.running
        num_keys = sum(len(sequence.tokens) for sequence in running)
        first_s = self._meter.step_s(len(running), len(running), 0.0, num_keys)
        made = Leap(num_steps, self._timeline.now_s, first_s, self._meter.decode_key_s * len(running))
        self._leap, self._is_busy = made, True
        self._timeline.at(made.end_s(num_steps), self._end_leap, made, num_steps)
        return True

    def _cut_short(self, made: "Leap") -> None:
        """A command came: the step that runs is the last one."""
        num_steps = made.num_steps_at(self._timeline.now_s)
        if num_steps < made.num_steps:
            made.num_steps = num_steps
            self._timeline.at(made.end_s(num_steps), self._end_leap, made, num_steps)

    def _end_leap(self, made: "Leap", num_steps: int) -> None:
        if made is not self._leap or num_steps != made.num_steps:
            return
        self._leap = None
        self.num_steps += num_steps
        self.busy_s += self._timeline.now_s - made.began_s
        scheduler = self.tier.engine.scheduler
        told = dict.fromkeys([sequence.id for sequence in scheduler.running], num_steps)
        ended = leap(scheduler, num_steps, TOKEN)
        for progress in ended:
            told[progress.sequence.id] -= 1  # the last one is among the events
        self._on_tokens(made, told)
        self.tier.engine.note_step(made.step_s(num_steps - 1), len(told))
        for progress in ended:
            self.tier.report(progress)
        self._tell()
        self._step()


class Leap:
    """`num_steps` steps from `began_s` on: the first takes `first_s`, each further one `more_s` longer."""

    __slots__ = ("began_s", "first_s", "more_s", "num_steps")

    def __init__(self, num_steps: int, began_s: float, first_s: float, more_s: float) -> None:
        self.num_steps = num_steps
        self.began_s = began_s
        self.first_s = first_s
        self.more_s = more_s

    def step_s(self, index: int) -> float:
        return self.first_s + index * self.more_s

    def end_s(self, num_steps: int) -> float:
        return self.began_s + num_steps * self.first_s + self.more_s * num_steps * (num_steps - 1) / 2

    def num_steps_at(self, moment_s: float) -> int:
        """Those begun by then, the one that runs included."""
        low, high = 1, self.num_steps
        while low < high:
            middle = (low + high) // 2
            if self.end_s(middle) >= moment_s:
                high = middle
            else:
                low = middle + 1
        return low
