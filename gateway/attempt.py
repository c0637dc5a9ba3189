"""One attempt of one handoff, as the gateway drives it: the event loop of a request's life.

    start ─► started ─► reserve ─► granted ─► grant to prefill ─► sealed ─► seal_verified ─► release ─► tokens ─► end
                └────────── first_token (may come before or after the grant) ──┘

The first token reaches the client as soon as it and a grant exist; with the verified seal at the latest. Whatever way
the attempt ends, everything still live on either worker is aborted.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from cluster.handoff_rows import HandoffRows
from core.clock import loop_time
from core.errors import (
    Busy,
    Cancelled,
    DeadlineExceeded,
    TandemError,
    TransferFailed,
    Unavailable,
    WorkerLost,
)
from core.ids import HandoffId
from core.worker import WorkerRecord
from gateway.fleet import Fleet
from gateway.generation import OutputToken
from gateway.link import CANCELLED, Cancel, FromWorker, Inbox, LinkLost, WorkerLink
from gateway.live import Live
from gateway.timing import Mark
from proto import convert
from proto import session_pb2 as pb
from proto import types_pb2 as types

CREDIT_TOKENS = 256
RESERVE_WAIT_S = 30.0
VERIFY_LIMIT_S = 10.0


class Attempt:
    """`tokens()` yields what the workers produce, in order, from output position len(committed) on."""

    def __init__(
        self,
        live: Live,
        committed: Sequence[int],
        fleet: Fleet,
        prefill: WorkerRecord | None,
        decode: Sequence[WorkerRecord],
        rows: HandoffRows,
    ) -> None:
        """Without a prefill worker the decode worker computes the prompt itself, if it is short enough for that."""
        self.id = HandoffId(live.request.request_id, live.report.num_attempts)
        self._request = live.request
        self._committed = tuple(committed)
        self._fleet = fleet
        self._rows = rows
        self._clock = live.clock
        self._report = live.report
        self._inbox: Inbox = asyncio.Queue()
        self._cancelled = live.cancelled
        self._prefill: WorkerLink | None = fleet.link(prefill) if prefill is not None else None
        self._is_local = prefill is None
        self._decode: WorkerLink | None = None
        self._candidates = list(decode)
        self._first: types.FirstToken | None = None
        self._next_position = len(committed)
        self._credit = CREDIT_TOKENS
        self._has_pending = True
        self._verify_by_s: float | None = None
        self._decode_was_asked = False
        self._is_granted = False
        self._is_verified = False
        self._is_over = False

    async def tokens(self) -> AsyncGenerator[OutputToken, None]:
        """Raises the typed error that ended the attempt; `retryable` says whether another may do better."""
        cancelling = asyncio.create_task(self._watch_cancel())
        try:
            self._start()
            while not self._is_over:
                event = await self._next_event()
                for token in self._on_event(event):
                    yield token
        finally:
            cancelling.cancel()
            self._rows.remove(self.id)
            self._end("the request ended")

    async def _watch_cancel(self) -> None:
        await self._cancelled.wait()
        self._inbox.put_nowait(CANCELLED)

    async def _next_event(self) -> FromWorker:
        """The next event of a worker that is still part of this; what one that was left has said is dropped."""
        while True:
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
                raise WorkerLost(f"{event.worker.worker_id}: {event.reason}")
            return event

    def _left_s(self) -> float:
        """Until the request's deadline, or that of its seal once that was sent."""
        remaining_s = self._remaining_s
        return remaining_s if self._verify_by_s is None else min(remaining_s, self._verify_by_s - loop_time())

    @property
    def _remaining_s(self) -> float:
        """What is left of the request's time: the workers get no more."""
        return self._request.deadline_s - self._clock.since(Mark.ARRIVED)

    def _too_late(self) -> TandemError:
        if self._remaining_s <= 0:
            return DeadlineExceeded(f"not done within {self._request.deadline_s:g} s")
        return TransferFailed(f"the seal was not verified within {VERIFY_LIMIT_S:g} s")

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
                self._verify_by_s = loop_time() + VERIFY_LIMIT_S
            case "seal_verified":
                return self._on_seal_verified(event.body)
            case "token":
                return self._on_token(event.body)
            case "failed":
                self._on_failed(event)
            case "aborted":
                raise TransferFailed(f"{event.worker.worker_id} ended the handoff")
        return []

    def _start(self) -> None:
        if self._prefill is None:
            self._clock.mark(Mark.STARTED)
            self._reserve_next()
            return
        self._report.prefill_worker_id = self._prefill.record.worker_id
        self._enter("prefill")
        self._prefill.subscribe(self.id, self._inbox)
        self._prefill.num_pending_tokens += self._num_tokens
        start = pb.PrefillStart(
            handoff_id=convert.handoff_id_to_proto(self.id),
            worker=convert.identity_to_proto(*self._prefill.record.key),
            prompt_ids=self._request.prompt_ids,
            output_ids=self._committed,
            sampling=convert.sampling_to_proto(self._request.params),
            deadline_s=max(self._remaining_s, 0.0),
        )
        self._prefill.send(pb.PrefillCommand(start=start))

    @property
    def _num_tokens(self) -> int:
        return len(self._request.prompt_ids) + len(self._committed)

    def _on_started(self, started: pb.PrefillStarted) -> None:
        self._clock.mark(Mark.STARTED)
        if not self._report.num_cached_tokens:
            self._report.num_cached_tokens = started.num_cached_tokens
        self._reserve_next()

    def _reserve_next(self) -> None:
        """Ask the next candidate for blocks: at once, but the last one may let us wait for room."""
        self._decode = self._next_candidate()
        self._decode.subscribe(self.id, self._inbox)
        reserve = pb.DecodeReserve(
            handoff_id=convert.handoff_id_to_proto(self.id),
            worker=convert.identity_to_proto(*self._decode.record.key),
            prompt_ids=self._request.prompt_ids,
            output_ids=self._committed,
            sampling=convert.sampling_to_proto(self._request.params),
            deadline_s=max(self._remaining_s, 0.0),
            wait_s=0.0 if self._candidates else RESERVE_WAIT_S,
            credit=CREDIT_TOKENS,
            is_local=self._is_local,
        )
        self._decode.send(pb.DecodeCommand(reserve=reserve))

    def _next_candidate(self) -> WorkerLink:
        """The best one left that can still be reached. Raises what its absence means."""
        was_asked = self._decode_was_asked
        while self._candidates:
            link = self._fleet.find(self._candidates.pop(0))
            if link is not None and link.is_up:
                self._decode_was_asked = True
                return link
        if self._is_local:
            raise Unavailable("no prefill worker is left, and decode workers only take short prompts")
        raise Busy("no decode worker has room") if was_asked else WorkerLost("no decode worker is left")

    def _on_granted(self, granted: pb.DecodeGranted) -> list[OutputToken]:
        if self._prefill is None or self._decode is None or self._is_granted:
            return []
        self._clock.mark(Mark.GRANTED)
        self._is_granted = True
        self._report.decode_worker_id = self._decode.record.worker_id
        self._enter("transfer")
        self._prefill.send(pb.PrefillCommand(grant=pb.PrefillGrant(grant=granted.grant)))
        return self._commit_first() if self._first is not None else []

    def _on_first_token(self, event: pb.PrefillFirstToken) -> list[OutputToken]:
        self._clock.mark(Mark.FIRST_TOKEN)
        self._settle_prefill_load()
        self._first = _only(event.first_tokens)
        if self._first.finish_reason:
            self._report.decode_worker_id = ""
            self._is_over = True
            return self._commit_first()
        return self._commit_first() if self._is_granted else []

    def _commit_first(self) -> list[OutputToken]:
        assert self._first is not None
        return self._accept(
            self._first.choice,
            self._first.position,
            self._first.token_id,
            self._first.logprob,
            self._first.finish_reason,
        )

    def _on_seal_verified(self, verified: pb.DecodeSealVerified) -> list[OutputToken]:
        """The decode worker has it all: the prefill side ends. Its first token must be the one already streamed."""
        self._clock.mark(Mark.FIRST_TOKEN)
        self._clock.mark(Mark.VERIFIED)
        self._is_verified = True
        self._verify_by_s = None
        self._enter("decode")
        self._report.num_kv_bytes += verified.num_bytes
        self._report.connector = verified.connector
        sealed = _only(verified.first_tokens)
        if self._first is not None and self._first.token_id != sealed.token_id:
            raise TransferFailed("the seal names another first token than prefill did")
        self._first = sealed
        if self._prefill is not None:
            release = pb.PrefillRelease(handoff_id=verified.handoff_id)
            self._prefill.send(pb.PrefillCommand(release=release))
            self._leave_prefill()
        return self._commit_first()

    def _on_token(self, token: pb.DecodeToken) -> list[OutputToken]:
        if not self._is_verified and not self._is_local:
            raise TransferFailed("a token came before the seal was verified")
        self._mark_token(token)
        self._report.num_preemptions = token.num_preemptions
        self._spend_credit(token)
        reason = token.finish_reason
        tokens = self._accept(token.choice, token.position, token.token_id, token.logprob, reason)
        if reason:
            self._leave_decode()
            self._is_over = True
            if not tokens:
                raise TransferFailed(f"the output ended again, with token {token.position}")
        return tokens

    def _mark_token(self, token: pb.DecodeToken) -> None:
        """The first two tokens end stages; without a handoff the first one ends all up to the verified seal."""
        if self._is_local and not self._is_verified and self._decode is not None:
            self._is_verified = True
            self._report.decode_worker_id = self._decode.record.worker_id
            self._enter("decode")
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
            credit = pb.DecodeCredit(handoff_id=token.handoff_id, num_tokens=num_tokens)
            self._decode.send(pb.DecodeCommand(credit=credit))

    def _accept(
        self, choice: int, position: int, token_id: int, logprob: float, reason: types.FinishReason
    ) -> list[OutputToken]:
        """In order and once: a position that was accepted already is dropped, a gap is a fault of the workers."""
        if position < self._next_position:
            return []
        if position > self._next_position:
            raise TransferFailed(f"token {position} came before token {self._next_position}")
        self._next_position += 1
        return [OutputToken(choice, position, token_id, logprob, convert.finish_name(reason))]

    def _on_failed(self, event: FromWorker) -> None:
        """A refusal of a reserve tries the next decode worker; anything else ends the attempt."""
        error = convert.error_from_proto(event.body.error)
        is_refusal = isinstance(error, Busy) and not self._is_granted
        if is_refusal and self._decode is not None and event.worker is self._decode.record:
            self._leave_decode()
            self._reserve_next()
            return
        raise error

    def _end(self, reason: str) -> None:
        """Abort what is still live. The answers are not waited for: the workers hold the truth about their blocks."""
        abort = pb.Abort(handoff_id=convert.handoff_id_to_proto(self.id), reason=reason)
        if self._prefill is not None:
            self._prefill.send(pb.PrefillCommand(abort=abort))
            self._leave_prefill()
        if self._decode is not None:
            self._decode.send(pb.DecodeCommand(abort=abort))
            self._leave_decode()

    def _enter(self, state: str) -> None:
        self._report.state = state
        self._rows.update(self.id, state, self._report.prefill_worker_id, self._report.decode_worker_id)

    def _settle_prefill_load(self) -> None:
        """The prompt is no longer queued there; counted once."""
        if self._prefill is not None and self._has_pending:
            self._has_pending = False
            self._prefill.num_pending_tokens -= self._num_tokens

    def _leave_prefill(self) -> None:
        self._settle_prefill_load()
        if self._prefill is not None:
            self._prefill.unsubscribe(self.id)
            self._prefill = None

    def _leave_decode(self) -> None:
        if self._decode is not None:
            self._decode.unsubscribe(self.id)
            self._decode = None


def _only(first_tokens: Sequence[types.FirstToken]) -> types.FirstToken:
    """That of the one choice. Raises TransferFailed when it is missing."""
    if not first_tokens:
        raise TransferFailed("the worker reported no first token")
    return first_tokens[0]
