"""One attempt of one handoff, as the gateway drives it: the event loop of a request's life.

    start ─► started ─► reserve ─► granted ─► grant to prefill ─► sealed ─► seal_verified ─► release ─► tokens ─► end
                └────────── first_token (may come before or after the grant) ──┘

The first token reaches the client as soon as it and a grant exist; with the verified seal at the latest. Whatever way
the attempt ends, everything still live on either worker is aborted, but for a prompt's blocks that another attempt
may have sent elsewhere: those stay leased (`lease`) until it takes them over.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from cluster.handoff_rows import HandoffRows
from core.errors import (
    Busy,
    Cancelled,
    DeadlineExceeded,
    StaleEpoch,
    TandemError,
    TransferFailed,
    Unavailable,
    WorkerLost,
)
from core.handoff import Handoff, HandoffState
from core.ids import HandoffId, WorkerId
from core.worker import WorkerRecord
from gateway.generation import OutputToken
from gateway.routing import commands
from gateway.routing.claims import Claims
from gateway.routing.fleet import Fleet
from gateway.routing.lease import Lease
from gateway.routing.link import CANCELLED, Cancel, FromWorker, Inbox, LinkLost, WorkerLink
from gateway.routing.live import Live
from gateway.routing.prefix_index import PrefixIndex
from gateway.routing.pulls import Pulls
from gateway.routing.router import Route
from gateway.routing.stage_limits import RESERVE_WAIT_S, Stage, StageLimits
from gateway.timing import Mark
from proto import convert
from proto import session_pb2 as pb
from proto import types_pb2 as types

CREDIT_TOKENS = 256


class Attempt:
    """`tokens()` yields what the workers produce, in order, from output position len(committed) on. After an error:
    `lease` is what a next attempt may take over, `suspects` are workers better avoided, `was_running_on_lost` tells
    that a worker died at this request's work."""

    def __init__(
        self,
        live: Live,
        committed: Sequence[int],
        fleet: Fleet,
        route: Route,
        rows: HandoffRows,
        prefixes: PrefixIndex,
        taken_over: Lease | None = None,
        pulls: Pulls | None = None,
    ) -> None:
        """A lease to be taken over must be of the route's prefill worker; a route with a pull needs `pulls`."""
        self.id = HandoffId(live.request.request_id, live.report.num_attempts)
        self._request = live.request
        self._committed = tuple(committed)
        self._covered = self._committed
        self._taken_over = taken_over
        self.lease: Lease | None = None
        self.suspects: set[WorkerId] = set()
        self.was_running_on_lost = False
        self._fleet = fleet
        self._rows = rows
        self._clock = live.clock
        self._report = live.report
        self._inbox: Inbox = asyncio.Queue()
        self._early: list[FromWorker] = []
        self._cancelled = live.cancelled
        self._is_handed_over = live.is_handed_over
        self._prefill: WorkerLink | None = fleet.link(route.prefill) if route.prefill is not None else None
        self._is_local = route.prefill is None
        self._began_after_s = 0.0
        self._decode: WorkerLink | None = None
        self._candidates = list(route.decode)
        self._first: types.FirstToken | None = None
        self._next_position = len(committed)
        self._num_preempted_before = live.report.num_preemptions
        self._credit = CREDIT_TOKENS
        self._pulls = pulls
        self._pull = route.pull
        self._claims = Claims(fleet, prefixes, live.request, self._num_tokens, route.overlap)
        self._decode_was_asked = False
        self._lifetime = Handoff()
        self._limits = StageLimits(self._num_tokens)

    async def tokens(self) -> AsyncGenerator[OutputToken, None]:
        """Raises the typed error that ended the attempt; `retryable` says whether another may do better."""
        cancelling = asyncio.create_task(self._watch_cancel())
        try:
            self._claim()
            await self._settle_pulls(cancelling)
            self._start()
            while not self._lifetime.state.is_terminal:
                event = await self._next_event()
                for token in self._on_event(event):
                    yield token
        except (StaleEpoch, TransferFailed, WorkerLost) as error:
            self._note_failure(error)
            raise
        finally:
            cancelling.cancel()
            self._rows.remove(self.id)
            self._end("the request ended")

    async def _watch_cancel(self) -> None:
        await self._cancelled.wait()
        self._inbox.put_nowait(CANCELLED)

    async def _next_event(self) -> FromWorker:
        """The next event of a worker that is still part of this; what one that was left has said is dropped. The two
        sessions are not in step: what the decode worker says of tokens waits for the prompt's scores."""
        while True:
            if self._early and not self._awaits_scores:
                return self._early.pop(0)
            try:
                async with asyncio.timeout(self._left_s()):
                    event = await self._inbox.get()
            except TimeoutError:
                raise self._too_late() from None
            if isinstance(event, Cancel):
                raise Cancelled("aborted on request")
            if not any(link and link.record is event.worker for link in (self._prefill, self._decode)):
                continue
            if isinstance(event, LinkLost):
                self._drop_lost(event.worker)
                raise WorkerLost(f"{event.worker.worker_id}: {event.reason}")
            if event.kind not in ("seal_verified", "token") or not self._awaits_scores:
                return event
            self._early.append(event)

    @property
    def _awaits_scores(self) -> bool:
        """The prefill worker has yet to tell them, or some: with its first token it has told all that it has."""
        is_prefilling = self._prefill is not None and self._first is None
        return is_prefilling and self._request.lacks_scores(self._report.prompt_scores)

    def _drop_lost(self, worker: WorkerRecord) -> None:
        if self._prefill is not None and self._prefill.record is worker:
            self.was_running_on_lost = self._clock.has(Mark.STARTED)
            self._leave_prefill()
        else:
            self.was_running_on_lost = self._lifetime.state is HandoffState.DECODING

    def _left_s(self) -> float:
        """Until the request's deadline, or that of the stage that it is in."""
        return min(self._remaining_s, self._limits.left_s)

    @property
    def _remaining_s(self) -> float:
        """What is left of the request's time: the workers get no more."""
        return self._request.deadline_s - self._clock.since(Mark.ARRIVED)

    def _too_late(self) -> TandemError:
        if self._remaining_s <= 0:
            return DeadlineExceeded(f"not done within {self._request.deadline_s:g} s")
        if self._limits.first is Stage.PREFILL and self._prefill is not None:
            self.suspects.add(self._prefill.record.worker_id)
            self._abort_prefill("it takes too long")
        elif self._decode is not None:
            self.suspects.add(self._decode.record.worker_id)
        return self._limits.error()

    def _on_event(self, event: FromWorker) -> list[OutputToken]:
        """Act on one event; returns the tokens that it makes available."""
        match event.kind:
            case "started":
                self._on_started(event.body)
            case "first_token":
                return self._on_first_token(event.body)
            case "granted":
                return self._on_granted(event.body)
            case "sealed":
                self._limits.end(Stage.TRANSFER)
                self._limits.begin(Stage.VERIFY)
            case "seal_verified":
                return self._on_seal_verified(event.body)
            case "token":
                return self._on_token(event.body)
            case "prompt_scores":
                self._report.add_scores(event.body.position, convert.scores_from_proto(event.body))
            case "failed":
                self._on_failed(event)
            case "aborted":
                raise TransferFailed(f"{event.worker.worker_id} ended the handoff")
        return []

    def _claim(self) -> None:
        """What others are routed by, from now on."""
        first = self._fleet.find(self._candidates[0]) if self._candidates else None
        computing = first if self._is_local else self._prefill
        if computing is not None:
            num_pulled = self._pull.num_tokens if self._pull is not None else 0
            self._claims.compute(computing, num_pulled)
        if not self._is_local:
            self._claims.place(self._candidates[0] if self._candidates else None)

    async def _settle_pulls(self, cancelling: asyncio.Task[None]) -> None:
        """What is to be pulled to where the prompt is computed is there afterwards, or will not be. Not waited for
        when the client cancels: the next event says so."""
        target = self._claims.computed_by
        if self._pulls is None or target is None or self._taken_over is not None:
            return
        if self._pull is None and not self._pulls.is_moving(target):
            return
        settling = asyncio.create_task(self._pulls.settle(target, self.id, self._request, self._pull))
        try:
            await asyncio.wait(
                [settling, cancelling], timeout=self._left_s(), return_when=asyncio.FIRST_COMPLETED
            )
            if settling.done() and not settling.result():
                self._report.causes.append("pull_failed")
        finally:
            settling.cancel()

    def _start(self) -> None:
        if self._prefill is None:
            self._began_after_s = self._clock.since(Mark.ARRIVED)
            self._reserve_next()
            return
        self._report.prefill_worker_id = self._prefill.record.worker_id
        self._tell_state()
        self._limits.begin(Stage.QUEUE)
        self._prefill.subscribe(self.id, self._inbox)
        takes_over = self._taken_over.handoff_id.attempt if self._taken_over is not None else 0
        start = commands.start_prefill(
            self.id, self._prefill.record, self._request, self._committed, self._remaining_s, takes_over
        )
        self._prefill.send(start)

    @property
    def _num_tokens(self) -> int:
        return len(self._request.prompt_ids) + len(self._committed)

    def _on_started(self, started: pb.PrefillStarted) -> None:
        self._clock.mark(Mark.STARTED)
        self._report.add_hits("prefill", started.num_cached_tokens)
        if self._taken_over is None:
            self._claims.observe(started.num_cached_tokens)
        self._covered = self._committed[: started.num_output_ids]
        self._limits.end(Stage.QUEUE)
        if self._first is None:
            self._limits.begin(Stage.PREFILL)
        self._reserve_next()

    def _reserve_next(self) -> None:
        """Ask the next candidate for blocks: at once, but the last one may let us wait for room."""
        self._claims.place(None)
        self._decode = self._next_candidate()
        self._decode.subscribe(self.id, self._inbox)
        if self._is_local and self._claims.computed_by is not self._decode.record:
            self._claims.compute(self._decode)
        self._limits.begin(Stage.LOCAL_PREFILL if self._is_local else Stage.GRANT)
        reserve = commands.reserve_decode(
            self.id,
            self._decode.record,
            self._request,
            self._covered,
            self._remaining_s,
            wait_s=0.0 if self._candidates else RESERVE_WAIT_S,
            credit=CREDIT_TOKENS,
            is_local=self._is_local,
        )
        self._decode.send(reserve)

    def _next_candidate(self) -> WorkerLink:
        """The best one left that can still be reached. Raises what its absence means."""
        was_asked = self._decode_was_asked
        while self._candidates:
            link = self._fleet.find(self._candidates.pop(0))
            if link is not None and link.is_up:
                self._decode_was_asked = True
                return link
        if self._is_local:
            raise Unavailable("no decode worker takes the prompt without a prefill worker")
        raise Busy("no decode worker has room") if was_asked else WorkerLost("no decode worker is left")

    def _on_granted(self, granted: pb.DecodeGranted) -> list[OutputToken]:
        if self._prefill is None or self._decode is None or self._lifetime.state is not HandoffState.PENDING:
            return []
        self._clock.mark(Mark.GRANTED)
        self._limits.end(Stage.GRANT)
        self._report.decode_worker_id = self._decode.record.worker_id
        self._report.add_hits("decode", granted.grant.num_cached_tokens)
        self._advance(HandoffState.GRANTED)
        self._prefill.send(commands.pass_grant(granted.grant))
        self._advance(HandoffState.RECEIVING)
        return self._both_are_there() if self._first is not None else []

    def _on_first_token(self, event: pb.PrefillFirstToken) -> list[OutputToken]:
        self._clock.mark(Mark.FIRST_TOKEN)
        self._limits.end(Stage.QUEUE, Stage.PREFILL)
        self._claims.computed()
        self._first = _only(event.first_tokens)
        if self._first.finish_reason:
            self._report.decode_worker_id = ""
            self._lifetime.end(HandoffState.ABORTED)
            return self._commit_first()
        return self._both_are_there() if self._lifetime.state is HandoffState.RECEIVING else []

    def _both_are_there(self) -> list[OutputToken]:
        """First token and grant: the rest of the transfer has its limit, the client its token."""
        self._limits.begin(Stage.TRANSFER)
        return self._commit_first()

    def _commit_first(self) -> list[OutputToken]:
        """The first token, unless it is one that an earlier attempt has committed: then it must be the same."""
        first = self._first
        assert first is not None
        if first.position < len(self._committed) and self._committed[first.position] != first.token_id:
            raise TransferFailed(f"token {first.position} is another than the one already streamed")
        return self._accept(first)

    def _on_seal_verified(self, verified: pb.DecodeSealVerified) -> list[OutputToken]:
        """The decode worker has it all: the prefill side ends. Its first token must be the one already streamed."""
        self._clock.mark(Mark.FIRST_TOKEN)
        self._clock.mark(Mark.VERIFIED)
        if self._lifetime.state is not HandoffState.RECEIVING:
            raise TransferFailed("a seal was verified that nobody waits for")
        self._limits.end(Stage.TRANSFER, Stage.VERIFY, Stage.PREFILL)
        self._limits.begin(Stage.FIRST_STEP)
        self._advance(HandoffState.SEALED)
        self._advance(HandoffState.DECODING)
        self._report.num_kv_bytes += verified.num_bytes
        self._report.connector = verified.connector
        sealed = _only(verified.first_tokens)
        if self._first is not None and self._first.token_id != sealed.token_id:
            raise TransferFailed("the seal names another first token than prefill did")
        self._first = sealed
        if self._prefill is not None:
            self._prefill.send(commands.release_prefill(self.id))
            self._leave_prefill()
        return self._commit_first()

    def _on_token(self, token: pb.DecodeToken) -> list[OutputToken]:
        if self._lifetime.state is not HandoffState.DECODING and not self._is_local:
            raise TransferFailed("a token came before the seal was verified")
        self._mark_token(token)
        self._limits.end(Stage.FIRST_STEP, Stage.LOCAL_PREFILL)
        self._limits.begin(Stage.TOKEN)
        self._report.num_preemptions = self._num_preempted_before + token.num_preemptions
        self._spend_credit(token)
        reason = token.finish_reason
        tokens = self._accept(token)
        if reason:
            self._leave_decode()
            self._lifetime.advance(HandoffState.FINISHED)
            if not tokens:
                raise TransferFailed(f"the output ended again, with token {token.position}")
        return tokens

    def _mark_token(self, token: pb.DecodeToken) -> None:
        """The first two tokens end stages; without a handoff the first one ends all up to the verified seal."""
        if self._is_local and self._lifetime.state is HandoffState.PENDING and self._decode is not None:
            self._report.decode_worker_id = self._decode.record.worker_id
            self._report.add_hits("local", token.num_cached_tokens)
            self._claims.observe(token.num_cached_tokens)
            self._claims.computed()
            self._advance(HandoffState.DECODING)
            took_s = self._clock.since(Mark.ARRIVED) - self._began_after_s
            self._clock.mark(Mark.STARTED, max(took_s - token.queue_s, 0.0))
            for mark in (Mark.FIRST_TOKEN, Mark.GRANTED, Mark.VERIFIED):
                self._clock.mark(mark)
        elif not self._clock.has(Mark.SECOND_TOKEN):
            self._clock.mark(Mark.STEP_BEGAN, self._clock.since(Mark.VERIFIED) - token.queue_s)
            self._clock.mark(Mark.SECOND_TOKEN)

    def _spend_credit(self, token: pb.DecodeToken) -> None:
        """Top up when half is used. Runs as tokens are taken by the client, so a slow one holds only itself back."""
        self._credit -= 1
        if self._credit < CREDIT_TOKENS // 2 and not token.finish_reason and self._decode is not None:
            num_tokens = CREDIT_TOKENS - self._credit
            self._credit = CREDIT_TOKENS
            self._decode.send(commands.add_credit(self.id, num_tokens))

    def _accept(self, token: types.FirstToken | pb.DecodeToken) -> list[OutputToken]:
        """In order and once: a position that was accepted already is dropped, a gap is a fault of the workers."""
        if token.position < self._next_position:
            return []
        if token.position > self._next_position:
            raise TransferFailed(f"token {token.position} came before token {self._next_position}")
        if self._request.lacks_scores(self._report.prompt_scores):
            raise TransferFailed("a token came before the prompt's scores")
        self._next_position += 1
        reason, top = convert.finish_name(token.finish_reason), convert.top_from_proto(token.top)
        return [OutputToken(token.choice, token.position, token.token_id, token.logprob, reason, top)]

    def _on_failed(self, event: FromWorker) -> None:
        """A refusal of a reserve tries the next decode worker; anything else ends the attempt."""
        error = convert.error_from_proto(event.body.error)
        is_refusal = isinstance(error, Busy) and self._lifetime.state is HandoffState.PENDING
        if is_refusal and self._decode is not None and event.worker is self._decode.record:
            self._report.num_refusals += 1
            self._leave_decode()
            self._reserve_next()
            return
        raise error

    def _note_failure(self, error: TandemError) -> None:
        """The prefill worker, if it is there, still holds the prompt's blocks: leave them to the next attempt. A
        transfer that fails again after it was repeated speaks against both of its ends."""
        if isinstance(error, TransferFailed) and self._decode is not None:
            self.suspects.add(self._decode.record.worker_id)
        if self._prefill is not None and self._prefill.is_up:
            if isinstance(error, TransferFailed) and self._taken_over is not None:
                self.suspects.add(self._prefill.record.worker_id)
            self.lease = Lease(self._prefill, self.id)
            self._leave_prefill()

    def _end(self, reason: str) -> None:
        """Abort what is still live. The answers are not waited for: the workers hold the truth about their blocks."""
        self._lifetime.end(HandoffState.ABORTED)
        self._claims.place(None)
        self._abort_prefill(reason)
        if self._decode is not None:
            self._decode.send(commands.abort_decode(self.id, reason))
            self._leave_decode()

    def _abort_prefill(self, reason: str) -> None:
        if self._prefill is not None:
            self._prefill.send(commands.abort_prefill(self.id, reason))
            self._leave_prefill()

    def _advance(self, state: HandoffState) -> None:
        self._lifetime.advance(state)
        self._tell_state()

    def _tell_state(self) -> None:
        state = self._report.state = self._lifetime.state
        if state is HandoffState.DECODING:
            self._is_handed_over.set()
        self._rows.update(self.id, state.value, self._report.prefill_worker_id, self._report.decode_worker_id)

    def _leave_prefill(self) -> None:
        self._claims.computed(self._prefill)
        if self._prefill is not None:
            self._prefill.unsubscribe(self.id)
            self._prefill = None

    def _leave_decode(self) -> None:
        if self._decode is not None:
            self._claims.computed(self._decode)
            self._decode.unsubscribe(self.id)
            self._decode = None


def _only(first_tokens: Sequence[types.FirstToken]) -> types.FirstToken:
    """That of the one choice. Raises TransferFailed when it is missing."""
    if not first_tokens:
        raise TransferFailed("the worker reported no first token")
    return first_tokens[0]
