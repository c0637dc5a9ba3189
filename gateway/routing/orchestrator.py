"""The gateway's core: routes a request, drives its attempts within one retry budget, yields its tokens.

Knows nothing of HTTP, text or tokenising. What was accepted is never taken back: an attempt after the first continues
from the committed tokens.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncGenerator, Sequence

from cluster.handoff_rows import HandoffRows
from core.errors import Busy, Cancelled, DeadlineExceeded, TandemError, Unavailable, WorkerLost
from core.handoff import HandoffState
from core.ids import HandoffId, RequestId, WorkerId
from core.logs import about_handoff
from core.scores import PromptScore
from core.worker import Role, WorkerRecord
from gateway.generation import GenerationRequest, OutputToken
from gateway.metrics import GatewayMetrics
from gateway.recent import Recent
from gateway.routing.admission import Admission
from gateway.routing.attempt import Attempt
from gateway.routing.fleet import Fleet
from gateway.routing.lease import Lease
from gateway.routing.live import HandoffReport, Live
from gateway.routing.prefix_index import PrefixIndex
from gateway.routing.pulls import Pulls
from gateway.routing.router import PULL_COST_S, Overlap, Route, RoutedPrompt, Routing, choose_route
from gateway.timing import Mark, StageClock, StageSpan, Timing

logger = logging.getLogger(__name__)
MAX_ATTEMPTS = 3
MAX_DEATHS = 2
RETRY_PAUSE_S = 0.2
MAX_LIVE_REQUESTS = 1024


class Orchestrator:
    """Owns the live requests, and what is remembered of those that ended."""

    def __init__(
        self,
        fleet: Fleet,
        prefixes: PrefixIndex,
        rows: HandoffRows,
        metrics: GatewayMetrics,
        admission: Admission | None = None,
        max_local_tokens: int = 0,
        choose: Routing = choose_route,
        pulls: Pulls | None = None,
        pull_cost_s: float = PULL_COST_S,
    ) -> None:
        """A prompt of which its decode worker lacks at most `max_local_tokens` is computed there: no handoff. Without
        `pulls` no prefix is moved."""
        self.admission = admission or Admission(math.inf)
        self._fleet = fleet
        self._prefixes = prefixes
        self._rows = rows
        self._metrics = metrics
        self.gaps = metrics.gaps
        self._max_local_tokens = max_local_tokens
        self._choose = choose
        self._pulls = pulls
        self._pull_cost_s = pull_cost_s
        self.live: dict[RequestId, Live] = {}
        self.recent = Recent()

    def begin(self, requests: Sequence[GenerationRequest]) -> "list[Generation]":
        """Admit the choices of one client's request, all of them or none, before any work. Raises Unavailable or
        Busy."""
        leaders = [request for request in requests if request.leader is None]
        self.check_room(sum(len(request.prompt_ids) for request in leaders), len(requests))
        for request in leaders:
            self.admission.arriving(request.request_id, len(request.prompt_ids))
        generations: dict[RequestId, Generation] = {}
        for request in requests:
            leader = generations[request.leader.request_id] if request.leader is not None else None
            generations[request.request_id] = Generation(self, request, leader, requests[0].request_id)
        return list(generations.values())

    def check_room(self, num_tokens: int = 1, num_choices: int = 1) -> None:
        """Whether prompts of at least that many tokens would be admitted now. Raises Unavailable or Busy."""
        tables = self._fleet.tables
        if not tables[Role.DECODE].num_open:
            raise Unavailable("no decode worker is connected")
        if len(self.live) + num_choices > MAX_LIVE_REQUESTS:
            raise Busy(f"{MAX_LIVE_REQUESTS} requests are running")
        block_size = tables[Role.DECODE].block_size
        num_waiting_blocks = sum(
            len(live.request.prompt_ids) // block_size + 1
            for live in self.live.values()
            if live.report.state is HandoffState.PENDING
        )
        draining = self._fleet.draining
        num_live = sum(live.report.decode_worker_id not in draining for live in self.live.values())
        self.admission.check(
            tables[Role.PREFILL], tables[Role.DECODE], num_tokens, num_waiting_blocks, num_live
        )

    def abort(self, request_id: str, tenant: str = "") -> bool:
        """End a request of that tenant, all its choices, by its own id or its client's. False when the tenant has no
        such request running here."""
        found = [
            live
            for live in self.live.values()
            if request_id
            and live.request.tenant == tenant
            and request_id in (live.answer_id, live.request.request_id, live.request.client_request_id)
        ]
        for live in found:
            live.cancelled.set()
        return bool(found)

    async def attempts(self, live: Live) -> AsyncGenerator[OutputToken, None]:
        """The request's tokens across its attempts. Raises the error of the last one."""
        history = History()
        try:
            while True:
                live.report.num_attempts += 1
                try:
                    async with contextlib.aclosing(self._attempt(live, history)) as tokens:
                        async for token in tokens:
                            history.committed.append(token.token_id)
                            yield token
                    return
                except TandemError as error:
                    is_refused_local = history.refuses_local(error)
                    can_retry = error.retryable or is_refused_local
                    if not can_retry or history.is_spent(live.report.num_attempts):
                        raise
                    self._note_retry(live, error)
                    await asyncio.sleep(0 if is_refused_local else RETRY_PAUSE_S)
        finally:
            history.give_back()

    async def _attempt(self, live: Live, history: "History") -> AsyncGenerator[OutputToken, None]:
        if live.request.lacks_scores(live.report.prompt_scores):
            history.give_back()  # nobody tells the scores of a prompt that is not computed again
        route = await self._route(live, history)
        lease = history.take(route.prefill)
        attempt = Attempt(
            live, history.committed, self._fleet, route, self._rows, self._prefixes, lease, self._pulls
        )
        if lease is not None:
            self._metrics.resends.inc()
        try:
            async with contextlib.aclosing(attempt.tokens()) as tokens:
                async for token in tokens:
                    yield token
        finally:
            history.note(attempt)

    async def _route(self, live: Live, history: "History") -> Route:
        """Who is to serve it, from what is known now; that a decode worker computes the prompt where others could is
        counted and reported. Raises WorkerLost when no decode worker is left."""
        request = live.request
        overlap = await self._overlap(live)
        asked = RoutedPrompt(
            len(request.prompt_ids) + len(history.committed),
            len(request.prompt_ids) + request.params.max_tokens,
            overlap,
            self._max_local_tokens,
            history.avoid,
            history.holder,
            history.may_be_local,
            self._held(request) if overlap else {},
            self._pull_cost_s,
        )
        route = self._choose(self._fleet.tables, asked)
        if not route.decode:
            raise WorkerLost("no decode worker is left")
        history.is_local_by_choice = route.cause not in ("", "no_prefill_worker")
        if route.cause:
            live.report.causes.append(route.cause)
            self._metrics.local_prefills.labels(cause=route.cause).inc()
        return route

    async def _overlap(self, live: Live) -> Overlap:
        """Who holds how much of the prompt: what the index says, and those who have just had all of it."""
        overlap = await self._prefixes.overlap(live.request.chain, self._fleet.block_size)
        hosts = live.leader.hosts if live.leader is not None else ()
        for link in self._fleet.links if hosts else ():
            if link.record.worker_id in hosts:
                overlap[link.record.epoch] = len(live.request.chain)
        return overlap

    def _held(self, request: GenerationRequest) -> Overlap:
        """What could be moved to where the prompt is computed."""
        return self._prefixes.held(request.chain, self._fleet.block_size) if self._pulls is not None else {}

    def _note_retry(self, live: Live, error: TandemError) -> None:
        told = about_handoff(HandoffId(live.request.request_id, live.report.num_attempts))
        logger.warning("attempt failed: %s", error, extra=told)
        live.report.causes.append(error.code.value)
        self._metrics.retries.labels(cause=error.code.value).inc()


class History:
    """What a request's attempts leave to the next one."""

    def __init__(self) -> None:
        self.committed: list[int] = []
        self.avoid: set[WorkerId] = set()
        self.may_be_local = True
        self.is_local_by_choice = False
        self._lease: Lease | None = None
        self._num_deaths = 0

    @property
    def holder(self) -> WorkerRecord | None:
        """Who still holds the prompt's blocks and is to send them again."""
        lease = self._lease
        if lease is None or not lease.link.is_up or lease.holder.worker_id in self.avoid:
            return None
        return lease.holder

    def refuses_local(self, error: TandemError) -> bool:
        """Whether that ended an attempt without a handoff where one would have been possible: the next has one."""
        is_refused = self.is_local_by_choice and isinstance(error, Unavailable)
        self.may_be_local = self.may_be_local and not is_refused
        self.is_local_by_choice = False
        return is_refused

    def take(self, prefill: WorkerRecord | None) -> Lease | None:
        """The lease for an attempt at that worker; one of another worker is given back."""
        if prefill is None or prefill is not self.holder:
            self.give_back()
        lease, self._lease = self._lease, None
        return lease

    def note(self, attempt: Attempt) -> None:
        self._lease = attempt.lease
        self.avoid |= attempt.suspects
        self._num_deaths += attempt.was_running_on_lost

    def is_spent(self, num_attempts: int) -> bool:
        """One that was at work on two workers as they died is not tried a third time: it may have been the cause."""
        return num_attempts >= MAX_ATTEMPTS or self._num_deaths >= MAX_DEATHS

    def give_back(self) -> None:
        if self._lease is not None:
            self._lease.give_back("nobody takes it over")
            self._lease = None


class Generation:
    """One admitted request: iterate `tokens()` once, then read `timing` and `report`."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        request: GenerationRequest,
        leader: "Generation | None" = None,
        answer_id: RequestId | None = None,
    ) -> None:
        self.request = request
        self.report = HandoffReport()
        self._clock = StageClock(arrived_s=request.arrived_s)
        self._clock.mark(Mark.ADMITTED)
        self._orchestrator = orchestrator
        self.live: Live = Live(
            request,
            self._clock,
            self.report,
            cancelled=asyncio.Event(),
            leader=leader.live if leader is not None else None,
            answer_id=answer_id,
        )

    async def tokens(self) -> AsyncGenerator[OutputToken, None]:
        """In order, once. Closing the iterator early aborts the request on both tiers."""
        live = self._orchestrator.live
        live[self.request.request_id] = self.live
        self._orchestrator.admission.arrived(self.request.request_id)
        source = self._orchestrator.attempts(self.live)
        watch = self._orchestrator.recent.watch(self.live)
        try:
            await self._follow()
            told_s: float | None = None
            async for token in source:
                now_s = self._clock.now()
                if told_s is not None:
                    self._orchestrator.gaps.note(now_s - told_s)
                told_s = now_s
                watch.token(token.finish_reason)
                yield token
        except TandemError as error:
            self.report.outcome = error.code.value
            raise
        finally:
            self._clock.mark(Mark.ENDED)
            self.live.is_handed_over.set()
            await source.aclose()
            self._orchestrator.admission.ended()
            del live[self.request.request_id]
            self._orchestrator.recent.add(self.live, self.timing)

    async def _follow(self) -> None:
        """Wait for the leader, if there is one. Raises Cancelled or DeadlineExceeded."""
        leader, live = self.live.leader, self.live
        if leader is None:
            return
        waits = [asyncio.ensure_future(event.wait()) for event in (leader.is_handed_over, live.cancelled)]
        try:
            left_s = self.request.deadline_s - self._clock.since(Mark.ARRIVED)
            done, _ = await asyncio.wait(waits, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if live.cancelled.is_set():
            raise Cancelled("aborted on request")
        if not done:
            raise DeadlineExceeded(f"not done within {self.request.deadline_s:g} s")

    @property
    def prompt_scores(self) -> Sequence[PromptScore]:
        """Complete with the first token; those of the leader for a choice that has one."""
        return (self.live.leader or self.live).report.prompt_scores

    @property
    def stage_spans(self) -> Sequence[StageSpan]:
        """What `timing` has of its stages, as moments of the event loop's clock."""
        return self._clock.spans()

    @property
    def timing(self) -> Timing:
        """Complete once tokens() has ended."""
        report = self.report
        return Timing(
            **self._clock.durations(),
            prefill_worker_id=report.prefill_worker_id,
            decode_worker_id=report.decode_worker_id,
            connector=report.connector,
            kv_bytes=report.num_kv_bytes,
            num_attempts=report.num_attempts,
            num_preemptions=report.num_preemptions,
            causes=tuple(report.causes),
        )
