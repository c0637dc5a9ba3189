"""A simulated cluster: what a gateway does with each request, over simulated workers. Router, admission, schedulers
and block pools are those that serve; what is here is the way between them.

    arrives ─► admitted, routed ─► started ─► reserved ─► first token ─► sent ─► decodes ─► ended
                  └─ refused          └─ no room: the next decode worker
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from bench.simulation.costs import HostCosts, Profile
from bench.simulation.events import Timeline
from bench.simulation.host import Host
from bench.simulation.requests import Asked, Gaps
from bench.simulation.worker import Leap, SimWorker, StepMeter, WorkerClock, make_tier
from core.block_hash import HASH_BLOCK_TOKENS, pool_chain
from core.errors import Busy
from core.grant import FirstToken
from core.ids import BlockHash, Epoch, HandoffId, RequestId, WorkerId
from core.kv_spec import DType, KVSpec
from core.worker import Role, WorkerRecord
from engine.block_pool import BlockPool
from engine.messages import (
    AbortWork,
    Activate,
    AnyCommand,
    AnyEvent,
    First,
    Granted,
    Release,
    Reserve,
    Reserved,
    Started,
    StartPrompt,
    Token,
    WorkFailed,
)
from engine.scheduler import SchedulerLimits
from gateway.routing.admission import Admission
from gateway.routing.prefix_mirror import Expectation, PrefixMirror
from gateway.routing.router import Overlap, RoutedPrompt, cached_tokens, choose_route
from gateway.routing.stage_limits import RESERVE_WAIT_S
from gateway.routing.worker_table import WorkerRow, WorkerTable

ANY_PROMPT = 1 << 30
CREDIT = 1 << 30
FIRST = [FirstToken(0, 0, 1, 0.0, False)]


@dataclass(frozen=True, slots=True)
class Plan:
    """A cluster as `tandem serve` would run it: tiers, or `num_colocated` engines instead. `is_one_host`: its workers
    share caches, and `borrows`: each other's idle cores; else each has a host of its own."""

    num_prefill: int = 1
    num_decode: int = 1
    num_colocated: int = 0
    num_threads: int = 1
    num_blocks: int = 2048
    block_size: int = 16
    max_batch: int = 64
    token_budget: int = 512
    max_queue_s: float = 10.0
    max_local_tokens: int = 0
    has_prefix_cache: bool = True
    is_one_host: bool = False
    borrows: bool = True
    pace_s: float = 0.0

    @property
    def workers(self) -> list[tuple[str, Role]]:
        if self.num_colocated:
            return [(f"colocated-{index:04}", Role.DECODE) for index in range(self.num_colocated)]
        counts = {Role.PREFILL: self.num_prefill, Role.DECODE: self.num_decode}
        return [(f"{role.value}-{index:04}", role) for role, n in counts.items() for index in range(n)]


@dataclass(slots=True)
class _Flow:
    """A request on its way through the workers."""

    asked: Asked
    prompt_ids: Sequence[int]
    prefill: WorkerRow | None = None
    decode: WorkerRow | None = None
    expected: WorkerRow | None = None
    expectation: Expectation | None = None
    num_cached: int = 0
    candidates: Sequence[WorkerRecord] = ()
    overlap: Overlap = field(default_factory=dict)
    num_blocks: int = 0
    is_granted: bool = False
    is_computed: bool = False
    num_last_tokens: int = 0


class Cluster:
    """`run()` it over requests; what became of them is in them, and in `gaps`."""

    def __init__(self, plan: Plan, profile: Profile, costs: HostCosts | None = None) -> None:
        self.plan = plan
        self.timeline = Timeline()
        self.gaps = Gaps()
        self.tables = {role: WorkerTable() for role in Role}
        self.workers: list[SimWorker] = []
        self._profile = profile
        self._link = profile.link
        self._admission = Admission(plan.max_queue_s, self.timeline)
        self._flows: dict[RequestId, _Flow] = {}
        self._of_row: dict[Epoch, SimWorker] = {}
        self._rows: dict[Epoch, WorkerRow] = {}
        self._mirror = PrefixMirror(max_blocks=1 << 40)
        self._num_waiting_blocks = 0
        self._host = Host(self.timeline, plan.borrows) if plan.is_one_host else None
        own = costs or profile.engines[plan.num_threads]
        for number, (name, role) in enumerate(plan.workers, 1):
            self._add(name, role, Epoch(number), own)

    def run(self, requests: Iterable[tuple[Asked, Sequence[int]]]) -> None:
        """Every request, with its prompt's token ids, to its end. They are in order of arrival, and taken as they
        arrive."""
        coming = iter(requests)
        self._await_next(coming)
        self.timeline.run()

    def _await_next(self, coming: Iterator[tuple[Asked, Sequence[int]]]) -> None:
        asked, prompt_ids = next(coming, (None, ()))
        if asked is not None:
            self.timeline.at(asked.at_s, self._arrive, _Flow(asked, prompt_ids), coming)

    @property
    def num_steps(self) -> int:
        return sum(worker.num_steps for worker in self.workers)

    def _add(self, name: str, role: Role, epoch: Epoch, costs: HostCosts) -> None:
        plan, profile = self.plan, self._profile
        spec = KVSpec(1, 1, 2, plan.block_size, DType.FLOAT16, profile.model)
        local = ANY_PROMPT if plan.num_colocated else plan.max_local_tokens
        record = WorkerRecord(
            worker_id=WorkerId(name),
            epoch=epoch,
            role=role,
            address="",
            model=profile.model,
            kv_spec=spec,
            context_len=profile.context_len,
            vocab_size=1 << 16,
            num_blocks=plan.num_blocks,
            max_batch=plan.max_batch,
            max_local_tokens=local if role is Role.DECODE else 0,
        )
        limits = SchedulerLimits(plan.block_size, plan.token_budget, plan.max_batch, profile.context_len)
        clock = WorkerClock(self.timeline)
        meter = StepMeter(costs, self._link, clock)
        pool = BlockPool(plan.num_blocks, plan.has_prefix_cache)
        tier = make_tier(record, limits, pool, meter, self._chain_of)
        place = self._host.place() if self._host is not None else None
        pace_s = plan.pace_s if role is Role.DECODE else 0.0
        worker = SimWorker(record, tier, meter, self.timeline, self._on_report, self._on_leap, place, pace_s)
        row = self.tables[role].add(record)
        row.set_up(True)
        row.publish(worker.load)
        self._mirror.add(epoch)
        self.workers.append(worker)
        self._of_row[epoch], self._rows[epoch] = worker, row

    def _chain_of(self, handoff_id: HandoffId) -> list[BlockHash]:
        return self._flows[handoff_id.request_id].asked.chain

    def _arrive(self, flow: _Flow, coming: Iterator[tuple[Asked, Sequence[int]]]) -> None:
        self._await_next(coming)
        asked = flow.asked
        try:
            self._admission.check(
                self.tables[Role.PREFILL],
                self.tables[Role.DECODE],
                asked.num_prompt,
                self._num_waiting_blocks,
                len(self._flows),
            )
        except Busy:
            asked.is_refused = True
            return
        self._flows[RequestId(asked.index)] = flow  # type: ignore[arg-type]
        flow.num_blocks = asked.num_prompt // self.plan.block_size + 1
        self._num_waiting_blocks += flow.num_blocks
        self.timeline.after(self._link.front_s, self._route, flow)

    def _route(self, flow: _Flow) -> None:
        asked, num_tokens = flow.asked, flow.asked.num_prompt
        max_len = num_tokens + asked.params.max_tokens
        overlap = self._overlap(asked.chain)
        route = choose_route(
            self.tables, RoutedPrompt(num_tokens, max_len, overlap, self.plan.max_local_tokens)
        )
        flow.candidates, flow.overlap = route.decode, overlap
        asked.is_local = route.prefill is None
        if route.prefill is None:
            self._reserve_next(flow)
            return
        flow.prefill = self._pend(route.prefill)
        self._compute(flow, flow.prefill)
        flow.expected = self._pend(flow.candidates[0]) if flow.candidates else None
        self._send(flow.prefill, StartPrompt(self._id(flow), flow.prompt_ids, [], asked.params))  # type: ignore[arg-type]

    def _overlap(self, chain: Sequence[BlockHash]) -> Overlap:
        """Leading hash blocks that each holds."""
        if not self.plan.has_prefix_cache:
            return {}
        depths = self._mirror.longest_prefix(pool_chain(chain, self.plan.block_size))
        return {epoch: depth * self.plan.block_size // HASH_BLOCK_TOKENS for epoch, depth in depths.items()}

    def _pend(self, record: WorkerRecord) -> WorkerRow:
        row = self._rows[record.epoch]
        row.pend_sequences(1)
        return row

    def _compute(self, flow: _Flow, row: WorkerRow) -> None:
        """The prompt is to be computed there, and counts until it is."""
        asked = flow.asked
        flow.num_cached = cached_tokens(row.record, asked.num_prompt, flow.overlap)
        row.pend_tokens(asked.num_prompt - flow.num_cached, flow.num_cached)
        if self.plan.has_prefix_cache:
            flow.expectation = self._mirror.expect(
                row.record.epoch, pool_chain(asked.chain, self.plan.block_size)
            )

    def _computed(self, flow: _Flow, row: WorkerRow) -> None:
        row.pend_tokens(flow.num_cached - flow.asked.num_prompt, -flow.num_cached)
        if flow.expectation is not None:
            self._mirror.end(flow.expectation)

    def _id(self, flow: _Flow) -> HandoffId:
        return HandoffId(RequestId(flow.asked.index), 1)  # type: ignore[arg-type]

    def _send(self, row: WorkerRow, command: AnyCommand) -> None:
        self.timeline.after(self._link.hop_s, self._of_row[row.record.epoch].send, command)

    def _on_report(self, worker: SimWorker, events: list[AnyEvent]) -> None:
        """What a worker tells reaches the gateway a hop later; its tokens the client after that."""
        self._follow_cache(worker)
        others = []
        for event in events:
            if type(event) is Token:
                self._on_token(event)
            else:
                others.append(event)
        self.timeline.after(self._link.hop_s, self._hear, worker, others)

    def _hear(self, worker: SimWorker, events: list[AnyEvent]) -> None:
        self._rows[worker.record.epoch].publish(worker.load)
        for event in events:
            flow = self._flows.get(event.id.request_id)
            if flow is not None:
                self._on_event(event, flow)

    def _on_event(self, event: AnyEvent, flow: _Flow) -> None:
        match event:
            case Started():
                self._reserve_next(flow)
            case Reserved():
                self._on_reserved(event, flow)
            case First():
                self._on_first(flow)
            case WorkFailed():
                assert flow.decode is not None
                if flow.asked.is_local:
                    self._computed(flow, flow.decode)
                self._leave(flow.decode)
                flow.decode = None
                self._reserve_next(flow)

    def _reserve_next(self, flow: _Flow) -> None:
        asked = flow.asked
        self._leave(flow.expected)
        flow.expected = None
        if not flow.candidates:
            self._end(flow)
            return
        record, *flow.candidates = flow.candidates
        flow.decode = self._pend(record)
        if asked.is_local:
            self._compute(flow, flow.decode)
        wait_s = 0.0 if flow.candidates else RESERVE_WAIT_S
        reserve = Reserve(self._id(flow), flow.prompt_ids, [], asked.params, wait_s, CREDIT, asked.is_local)  # type: ignore[arg-type]
        self._send(flow.decode, reserve)

    def _on_reserved(self, reserved: Reserved, flow: _Flow) -> None:
        flow.is_granted = True
        flow.num_last_tokens = reserved.num_tokens - reserved.num_cached_tokens
        self._num_waiting_blocks -= flow.num_blocks
        flow.num_blocks = 0
        assert flow.prefill is not None
        self._send(flow.prefill, Granted(self._id(flow)))
        if flow.is_computed:
            self._transfer(flow)

    def _on_first(self, flow: _Flow) -> None:
        flow.is_computed = True
        assert flow.prefill is not None
        self._computed(flow, flow.prefill)
        if flow.asked.params.max_tokens == 1:
            self._first_token(flow.asked)
            self._send(flow.prefill, Release(self._id(flow)))
            if flow.decode is not None:
                self._send(flow.decode, AbortWork(self._id(flow)))
            self._end(flow)
        elif flow.is_granted:
            self._transfer(flow)

    def _transfer(self, flow: _Flow) -> None:
        """First token and grant are there. Blocks left while later ones were computed: those of the last step are
        sent now."""
        self._first_token(flow.asked)
        num_tokens = min(flow.num_last_tokens, self.plan.token_budget)
        link = self._link
        took_s = link.transfer_s + num_tokens * self._profile.kv_bytes_per_token / link.bytes_per_s
        self.timeline.after(took_s, self._verified, flow)

    def _verified(self, flow: _Flow) -> None:
        assert flow.prefill is not None
        assert flow.decode is not None
        self._of_row[flow.decode.record.epoch].send(Activate(self._id(flow), FIRST))
        self._send(flow.prefill, Release(self._id(flow)))
        self._leave(flow.prefill)
        flow.prefill = None

    def _first_token(self, asked: Asked) -> None:
        asked.first_s = asked.last_s = self.timeline.now_s + self._link.token_s
        asked.num_tokens = 1

    def _on_token(self, token: Token) -> None:
        """One of an ordinary step."""
        flow = self._flows.get(token.id.request_id)
        if flow is None:
            return
        asked = flow.asked
        if asked.num_tokens == 0:  # computed where it decodes
            self._first_token(asked)
            self._num_waiting_blocks -= flow.num_blocks
            flow.num_blocks = 0
            assert flow.decode is not None
            self._computed(flow, flow.decode)
        else:
            self._note_gap(asked, self.timeline.now_s + self._link.token_s)
            asked.num_tokens += 1
        if token.finish_reason:
            self._end(flow)

    def _note_gap(self, asked: Asked, now_s: float) -> None:
        gap_s = now_s - asked.last_s
        self.gaps.add(gap_s)
        asked.worst_gap_s = max(asked.worst_gap_s, gap_s)
        asked.last_s = now_s

    def _on_leap(self, leap: Leap, num_steps: dict[HandoffId, int]) -> None:
        """A token of each in each of the leap's first so many steps."""
        flows, token_s, began_s = self._flows, self._link.token_s, leap.began_s
        num_equal = 0
        for handoff_id, own_steps in num_steps.items():
            flow = flows.get(handoff_id.request_id)
            if flow is None or not own_steps:
                continue
            asked, num_gaps = flow.asked, own_steps
            asked.num_tokens += own_steps
            if asked.last_s < began_s:  # it has just come, and waited for a step
                self._note_gap(asked, leap.end_s(1) + token_s)
                num_gaps -= 1
            if num_gaps:
                num_equal += num_gaps
                asked.worst_gap_s = max(asked.worst_gap_s, leap.step_s(own_steps - 1))
                asked.last_s = leap.end_s(own_steps) + token_s
        if num_equal:
            self.gaps.add(leap.step_s(leap.num_steps // 2), num_equal)

    def _end(self, flow: _Flow) -> None:
        """It is over: whole, or refused by everybody."""
        self._num_waiting_blocks -= flow.num_blocks
        self._admission.ended()
        for row in (flow.prefill, flow.decode, flow.expected):
            self._leave(row)
        del self._flows[RequestId(flow.asked.index)]  # type: ignore[arg-type]

    def _leave(self, row: WorkerRow | None) -> None:
        if row is not None:
            row.pend_sequences(-1)

    def _follow_cache(self, worker: SimWorker) -> None:
        if not self.plan.has_prefix_cache:
            return
        for is_stored, block_hash in worker.tier.engine.scheduler.pool.drain_changes():
            change = self._mirror.store if is_stored else self._mirror.discard
            change(worker.record.epoch, (block_hash,))


_ANY = [BlockHash(b"")] * (1 << 16)


def chain_of(num_prompt: int, shared: Sequence[int], block_tokens: int, index: int) -> list[BlockHash]:
    """Hashes of a made-up prompt's full hash blocks: equal where the prompts are."""
    num_blocks, per_shared = num_prompt // HASH_BLOCK_TOKENS, max(1, block_tokens // HASH_BLOCK_TOKENS)
    chain: list[BlockHash] = []
    prefix = b""
    for block in shared:
        prefix = b"%b,%d" % (prefix[-40:], block)
        chain += [BlockHash(b"%b:%d" % (prefix, part)) for part in range(per_shared)]
    own = range(len(chain), num_blocks)
    return [*chain[:num_blocks], *(BlockHash(b"%d.%d" % (index, number)) for number in own)]


def any_chain(num_prompt: int) -> list[BlockHash]:
    """As long as that prompt's, where nobody looks at it."""
    return _ANY[: num_prompt // HASH_BLOCK_TOKENS]
