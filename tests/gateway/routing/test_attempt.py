"""One attempt, event by event: real links and a real fleet, the test speaks for the workers. However it ends, both
workers are told, nothing stays subscribed and no load stays counted."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from core.errors import (
    Busy,
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    StaleEpoch,
    TandemError,
    TransferFailed,
    Unavailable,
    WorkerLost,
)
from core.ids import HandoffId
from core.sampling import SamplingParams
from core.scores import PromptScore
from core.worker import Role
from gateway.generation import GenerationRequest, OutputToken
from gateway.routing.attempt import CREDIT_TOKENS, RESERVE_WAIT_S, Attempt
from gateway.routing.live import HandoffReport, Live
from gateway.routing.router import Route, rank_decode
from gateway.timing import Mark, StageClock
from proto import convert
from proto import session_pb2 as pb
from proto import types_pb2 as types
from tests.gateway.peers import LIMIT_S, Rig, Worker

PROMPT = tuple(range(40))
PARAMS = SamplingParams(32, 0.0)


def begin(
    rig: Rig,
    committed: tuple[int, ...] = (),
    is_local: bool = False,
    deadline_s: float = 60.0,
    params: SamplingParams = PARAMS,
) -> "Run":
    request = GenerationRequest(PROMPT, params, (), deadline_s)
    live = Live(request, StageClock(rig.clock), HandoffReport(num_attempts=1), asyncio.Event())
    prefill = None if is_local else rig.prefill[0].record
    decode = [worker.record for worker in rig.decode]
    route = Route(prefill, decode, {})
    return Run(Attempt(live, committed, rig.fleet, route, rig.rows, rig.prefixes), live, rig)


class Run:
    """An attempt being iterated, and the events of a usual one."""

    def __init__(self, attempt: Attempt, live: Live, rig: Rig) -> None:
        self.id = convert.handoff_id_to_proto(attempt.id)
        self.live = live
        self.tokens: list[OutputToken] = []
        self.attempt = attempt
        self._rig = rig
        self._new = asyncio.Event()
        self._task = asyncio.create_task(self._iterate(attempt))

    async def _iterate(self, attempt: Attempt) -> None:
        async for token in attempt.tokens():
            self.tokens.append(token)
            self._new.set()

    async def until(self, count: int) -> list[int]:
        async with asyncio.timeout(LIMIT_S):
            while len(self.tokens) < count:
                self._new.clear()
                await self._new.wait()
        return [token.token_id for token in self.tokens]

    async def end(self) -> TandemError | None:
        """What ended it; both workers and all counters are back to nothing."""
        async with asyncio.timeout(LIMIT_S):
            (result,) = await asyncio.gather(self._task, return_exceptions=True)
        if self.attempt.lease is not None:
            self.attempt.lease.give_back("nobody takes it over")
        self._rig.assert_clean()
        assert result is None or isinstance(result, TandemError), repr(result)
        return result

    async def settle(self) -> None:
        """Let what was emitted arrive."""
        for _ in range(20):
            await asyncio.sleep(0)

    def first(self, token_id: int = 7, position: int = 0, reason: str = "") -> types.FirstToken:
        finish = convert.FINISH_REASONS[reason]
        return types.FirstToken(position=position, token_id=token_id, finish_reason=finish)

    def emit_started(self, num_output_ids: int = 0) -> None:
        started = pb.PrefillStarted(handoff_id=self.id, num_cached_tokens=16, num_output_ids=num_output_ids)
        self._rig.prefill[0].emit(started=started)

    def emit_first(self, *tokens: types.FirstToken) -> None:
        first = pb.PrefillFirstToken(handoff_id=self.id, first_tokens=tokens or [self.first()])
        self._rig.prefill[0].emit(first_token=first)

    def emit_scores(self, position: int, count: int) -> None:
        scores = [PromptScore(-1.0, 1)] * count
        told = convert.scores_to_proto(self.attempt.id, position, scores)
        self._rig.prefill[0].emit(prompt_scores=told)

    def emit_granted(self, worker: int = 0) -> None:
        grant = types.Grant(handoff_id=self.id, mac=b"opaque")
        self._rig.decode[worker].emit(granted=pb.DecodeGranted(grant=grant))

    def emit_sealed(self) -> None:
        self._rig.prefill[0].emit(sealed=pb.PrefillSealed(handoff_id=self.id))

    def emit_verified(self, *tokens: types.FirstToken, worker: int = 0) -> None:
        verified = pb.DecodeSealVerified(
            handoff_id=self.id, first_tokens=tokens or [self.first()], num_bytes=99, connector="shm"
        )
        self._rig.decode[worker].emit(seal_verified=verified)

    def emit_token(self, position: int, token_id: int = 0, reason: str = "", worker: int = 0) -> None:
        token = pb.DecodeToken(
            handoff_id=self.id,
            position=position,
            token_id=token_id or 7 + position,
            finish_reason=convert.FINISH_REASONS[reason],
        )
        self._rig.decode[worker].emit(token=token)

    def emit_failed(self, worker: Worker, error: TandemError) -> None:
        worker.emit(failed=pb.Failed(handoff_id=self.id, error=convert.error_to_proto(error)))

    async def to_decode(self) -> None:
        """The usual way up to the verified seal."""
        prefill, decode = self._rig.prefill[0], self._rig.decode[0]
        await prefill.take("start")
        self.emit_started()
        await decode.take("reserve")
        self.emit_granted()
        await prefill.take("grant")
        self.emit_first()
        self.emit_sealed()
        self.emit_verified()
        await prefill.take("release")


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    await made.connect()
    yield made
    await made.close()


async def test_the_usual_way(rig):
    run = begin(rig)
    start = await rig.prefill[0].take("start")
    assert (tuple(start.prompt_ids), start.worker.worker_id) == (PROMPT, "p0")
    assert rig.fleet.link(rig.prefill[0].record).row.num_pending_tokens == 40
    run.emit_started()
    reserve = await rig.decode[0].take("reserve")
    assert (reserve.wait_s, reserve.credit, reserve.is_local) == (0.0, CREDIT_TOKENS, False)
    run.emit_granted()
    assert (await rig.prefill[0].take("grant")).grant.mac == b"opaque"
    run.emit_first()
    assert await run.until(1) == [7]
    assert rig.fleet.link(rig.prefill[0].record).row.num_pending_tokens == 0
    run.emit_sealed()
    run.emit_verified()
    await rig.prefill[0].take("release")
    run.emit_token(1)
    run.emit_token(2, reason="stop")
    assert await run.end() is None
    assert [token.finish_reason for token in run.tokens] == ["", "", "stop"]
    report = run.live.report
    assert (report.num_kv_bytes, report.connector, report.num_cached_tokens) == (99, "shm", 16)
    assert (report.prefill_worker_id, report.decode_worker_id) == ("p0", "d0")
    assert all(worker.commands.empty() for worker in rig.workers), "nothing is left to be aborted"


async def test_a_burst_spreads_before_prefill_has_begun_any_of_it(rig):
    def best() -> str:
        return rank_decode(rig.fleet.tables[Role.DECODE], len(PROMPT), len(PROMPT) + 32, {})[0].worker_id

    idle = best()
    assert idle == rig.decode[0].record.worker_id
    run = begin(rig)
    await run.settle()
    assert best() != idle
    run.emit_started()
    await run.settle()
    assert best() != idle
    link = rig.fleet.find(rig.decode[0].record)
    assert link is not None
    assert link.row.num_pending == 1
    run.live.cancelled.set()
    assert isinstance(await run.end(), Cancelled)
    assert best() == idle


async def test_the_first_token_waits_for_the_grant(rig):
    run = begin(rig)
    await rig.prefill[0].take("start")
    run.emit_started()
    run.emit_first()
    await rig.decode[0].take("reserve")
    await run.settle()
    assert run.tokens == []
    run.emit_granted()
    assert await run.until(1) == [7]
    run._task.cancel()
    await asyncio.wait([run._task])
    await rig.prefill[0].take("grant")
    await rig.prefill[0].take("abort")
    await rig.decode[0].take("abort")
    rig.assert_clean()


async def test_the_verified_seal_brings_the_first_token_if_nothing_else_did(rig):
    run = begin(rig)
    await rig.prefill[0].take("start")
    run.emit_started()
    await rig.decode[0].take("reserve")
    run.emit_granted()
    run.emit_verified()
    assert await run.until(1) == [7]
    run.emit_first()
    run.emit_token(1, reason="length")
    assert await run.end() is None
    assert run.live.clock.has(Mark.FIRST_TOKEN)


async def test_a_first_token_that_ends_the_request_needs_no_decode_worker(rig):
    run = begin(rig)
    await rig.prefill[0].take("start")
    run.emit_first(run.first(reason="stop"))
    assert await run.end() is None
    assert [token.finish_reason for token in run.tokens] == ["stop"]
    await rig.prefill[0].take("abort")
    assert rig.decode[0].commands.empty()


async def test_a_first_token_that_ends_a_granted_request_gives_the_grant_back(rig):
    run = begin(rig)
    await rig.prefill[0].take("start")
    run.emit_started()
    await rig.decode[0].take("reserve")
    run.emit_granted()
    run.emit_first(run.first(reason="length"))
    assert await run.end() is None
    await rig.prefill[0].take("grant")
    await rig.prefill[0].take("abort")
    await rig.decode[0].take("abort")


async def test_without_room_the_next_candidate_is_asked_and_the_last_may_wait(rig):
    run = begin(rig)
    await rig.prefill[0].take("start")
    run.emit_started()
    assert (await rig.decode[0].take("reserve")).wait_s == 0.0
    run.emit_failed(rig.decode[0], Busy("full"))
    assert (await rig.decode[1].take("reserve")).wait_s == RESERVE_WAIT_S
    assert rig.fleet.link(rig.decode[0].record).num_open == 0
    run.emit_failed(rig.decode[1], Busy("full"))
    assert isinstance(await run.end(), Busy)
    await rig.prefill[0].take("abort")


async def test_what_a_refusing_candidate_says_later_changes_nothing(rig):
    run = begin(rig)
    await rig.prefill[0].take("start")
    run.emit_started()
    await rig.decode[0].take("reserve")
    run.emit_failed(rig.decode[0], Busy("full"))
    run.emit_granted(worker=0)
    rig.decode[0].hang_up()
    await rig.decode[1].take("reserve")
    run.emit_granted(worker=1)
    run.emit_first()
    assert await run.until(1) == [7]
    assert run.live.report.decode_worker_id == "d1"
    run.emit_verified(worker=1)
    run.emit_token(1, reason="stop", worker=1)
    assert await run.end() is None


async def test_a_candidate_that_has_gone_is_passed_over(rig):
    run = begin(rig)
    await rig.prefill[0].take("start")
    rig.decode[0].hang_up()
    await run.settle()
    run.emit_started()
    reserve = await rig.decode[1].take("reserve")
    assert reserve.worker.worker_id == "d1"
    rig.decode[1].hang_up()
    assert isinstance(await run.end(), WorkerLost)


async def test_without_any_candidate_left_a_worker_was_lost(rig):
    run = begin(rig)
    await rig.prefill[0].take("start")
    for worker in rig.decode:
        worker.hang_up()
    await run.settle()
    run.emit_started()
    error = await run.end()
    assert isinstance(error, WorkerLost)
    assert error.retryable


async def test_a_busy_prefill_worker_ends_the_attempt(rig):
    run = begin(rig)
    await rig.prefill[0].take("start")
    run.emit_failed(rig.prefill[0], Busy("too many prompts", 3.0))
    error = await run.end()
    assert isinstance(error, Busy)
    assert error.retry_after_s == 3.0


@pytest.mark.parametrize("error", [EngineFailed("NaN"), TransferFailed("digest"), StaleEpoch("restarted")])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_failure_arrives_as_what_it_was(rig, role, error):
    run = begin(rig)
    await rig.prefill[0].take("start")
    run.emit_started()
    await rig.decode[0].take("reserve")
    run.emit_failed(rig.prefill[0] if role is Role.PREFILL else rig.decode[0], error)
    ended = await run.end()
    assert type(ended) is type(error)
    await rig.prefill[0].take("abort")
    await rig.decode[0].take("abort")


async def test_a_lost_prefill_worker_is_told_apart_from_one_that_was_done_with(rig):
    run = begin(rig)
    await run.to_decode()
    rig.prefill[0].hang_up()
    run.emit_token(1)
    assert await run.until(2) == [7, 8]
    rig.decode[0].hang_up()
    assert isinstance(await run.end(), WorkerLost)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_lost_worker_ends_the_attempt_and_the_other_is_told(rig, role):
    run = begin(rig)
    await rig.prefill[0].take("start")
    run.emit_started()
    await rig.decode[0].take("reserve")
    lost, other = (rig.prefill[0], rig.decode[0])[:: 1 if role is Role.PREFILL else -1]
    lost.hang_up()
    error = await run.end()
    assert isinstance(error, WorkerLost)
    assert lost.record.worker_id in str(error)
    await other.take("abort")


async def test_positions_are_taken_in_order_and_once(rig):
    run = begin(rig)
    await run.to_decode()
    for position in (0, 1, 1, 0, 2, 1):
        run.emit_token(position)
    assert await run.until(3) == [7, 8, 9]
    await run.settle()
    assert len(run.tokens) == 3
    run.emit_token(4)
    error = await run.end()
    assert isinstance(error, TransferFailed)
    assert error.retryable
    await rig.decode[0].take("abort")


async def test_a_continuation_begins_after_what_is_committed(rig):
    run = begin(rig, committed=(1, 2, 3))
    start = await rig.prefill[0].take("start")
    assert list(start.output_ids) == [1, 2, 3]
    assert rig.fleet.link(rig.prefill[0].record).row.num_pending_tokens == 43
    run.emit_started(num_output_ids=3)
    assert list((await rig.decode[0].take("reserve")).output_ids) == [1, 2, 3]
    run.emit_granted()
    run.emit_first(run.first(9, position=3))
    run.emit_verified(run.first(9, position=3))
    run.emit_token(4, reason="length")
    assert await run.end() is None
    assert [token.position for token in run.tokens] == [3, 4]


NONSENSE: dict[str, Callable[[Run], None]] = {
    "no first token": lambda run: run._rig.prefill[0].emit(
        first_token=pb.PrefillFirstToken(handoff_id=run.id)
    ),
    "a seal without a first token": lambda run: run._rig.decode[0].emit(
        seal_verified=pb.DecodeSealVerified(handoff_id=run.id)
    ),
    "a token before the seal": lambda run: run.emit_token(0),
    "the handoff's end": lambda run: run._rig.decode[0].emit(aborted=pb.Aborted(handoff_id=run.id)),
    "a first position too far": lambda run: run.emit_first(run.first(position=2)),
}


@pytest.mark.parametrize("name", NONSENSE)
async def test_what_makes_no_sense_is_a_failed_transfer(rig, name):
    run = begin(rig)
    await rig.prefill[0].take("start")
    run.emit_started()
    await rig.decode[0].take("reserve")
    run.emit_granted()
    NONSENSE[name](run)
    assert isinstance(await run.end(), TransferFailed)


async def test_a_seal_must_name_the_first_token_that_was_streamed(rig):
    run = begin(rig)
    await rig.prefill[0].take("start")
    run.emit_started()
    await rig.decode[0].take("reserve")
    run.emit_granted()
    run.emit_first()
    assert await run.until(1) == [7]
    run.emit_verified(run.first(8))
    assert isinstance(await run.end(), TransferFailed)


async def test_an_output_ends_once(rig):
    run = begin(rig)
    await run.to_decode()
    run.emit_token(1)
    run.emit_token(1, reason="stop")
    assert isinstance(await run.end(), TransferFailed)


async def test_an_unknown_finish_reason_is_a_typed_error(rig):
    run = begin(rig)
    await run.to_decode()
    rig.decode[0].emit(token=pb.DecodeToken(handoff_id=run.id, position=1, finish_reason=99))
    assert isinstance(await run.end(), EngineFailed)


async def test_a_second_grant_and_events_of_others_change_nothing(rig):
    run = begin(rig)
    await run.to_decode()
    run.emit_granted()
    rig.prefill[1].emit(started=pb.PrefillStarted(handoff_id=run.id))
    other = convert.handoff_id_to_proto(HandoffId("someone", 1))
    rig.decode[0].emit(token=pb.DecodeToken(handoff_id=other, position=1, token_id=5))
    run.emit_token(1, reason="stop")
    assert await run.end() is None
    assert [token.token_id for token in run.tokens] == [7, 8]


async def test_credit_is_topped_up_as_tokens_are_taken(rig):
    run = begin(rig)
    await run.to_decode()
    for position in range(1, CREDIT_TOKENS + 1):
        run.emit_token(position)
    credit = await rig.decode[0].take("credit")
    assert CREDIT_TOKENS // 2 < credit.num_tokens < CREDIT_TOKENS
    run.emit_token(CREDIT_TOKENS + 1, reason="stop")
    assert await run.end() is None


async def test_a_cancel_ends_it_at_any_stage_with_aborts_to_both(rig):
    run = begin(rig)
    await run.to_decode()
    run.live.cancelled.set()
    assert isinstance(await run.end(), Cancelled)
    await rig.decode[0].take("abort")
    assert rig.prefill[0].commands.empty(), "it was released before"
    early = begin(rig)
    early.live.cancelled.set()
    assert isinstance(await early.end(), Cancelled)
    await rig.prefill[0].take("start")
    await rig.prefill[0].take("abort")


async def test_the_deadline_ends_it(rig):
    run = begin(rig, deadline_s=0.05)
    await rig.prefill[0].take("start")
    rig.clock.advance(0.05)
    error = await run.end()
    assert isinstance(error, DeadlineExceeded)
    assert not error.retryable
    await rig.prefill[0].take("abort")


async def test_a_reader_that_stops_early_ends_it(rig):
    run = begin(rig)
    run._task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await run._task
    request = GenerationRequest(PROMPT, SamplingParams(32, 0.0))
    live = Live(request, StageClock(rig.clock), HandoffReport(num_attempts=2), asyncio.Event())
    route = Route(rig.prefill[0].record, [worker.record for worker in rig.decode], {})
    attempt = Attempt(live, (), rig.fleet, route, rig.rows, rig.prefixes)
    tokens = attempt.tokens()
    waiting = asyncio.ensure_future(anext(tokens))
    await rig.prefill[0].take("start")
    handoff_id = convert.handoff_id_to_proto(attempt.id)
    first = types.FirstToken(token_id=7)
    rig.prefill[0].emit(started=pb.PrefillStarted(handoff_id=handoff_id))
    await rig.decode[0].take("reserve")
    rig.decode[0].emit(granted=pb.DecodeGranted(grant=types.Grant(handoff_id=handoff_id)))
    rig.prefill[0].emit(first_token=pb.PrefillFirstToken(handoff_id=handoff_id, first_tokens=[first]))
    assert (await waiting).token_id == 7
    await tokens.aclose()
    rig.assert_clean()
    await rig.prefill[0].take("grant")
    await rig.prefill[0].take("abort")
    await rig.decode[0].take("abort")


async def test_a_prompt_computed_on_decode_has_no_prefill_side(rig):
    run = begin(rig, is_local=True)
    reserve = await rig.decode[0].take("reserve")
    assert reserve.is_local
    for position in range(3):
        run.emit_token(position, reason="stop" if position == 2 else "")
    assert await run.end() is None
    assert [token.token_id for token in run.tokens] == [7, 8, 9]
    assert run.live.report.decode_worker_id == "d0"
    assert all(run.live.clock.has(mark) for mark in (Mark.FIRST_TOKEN, Mark.VERIFIED, Mark.SECOND_TOKEN))


async def test_a_recovery_on_decode_alone_after_an_attempt_that_got_a_first_token(rig):
    run = begin(rig, committed=(1,), is_local=True)
    run.live.clock.mark(Mark.STARTED)
    run.live.clock.mark(Mark.FIRST_TOKEN)
    await rig.decode[0].take("reserve")
    run.emit_token(1)
    run.emit_token(2, reason="length")
    assert await run.end() is None
    assert [token.position for token in run.tokens] == [1, 2]


async def test_when_no_decode_worker_takes_the_prompt_alone_the_service_is_unavailable(rig):
    run = begin(rig, is_local=True)
    for worker in rig.decode:
        await worker.take("reserve")
        run.emit_failed(worker, Busy("too long"))
    assert isinstance(await run.end(), Unavailable)


async def test_what_the_decode_worker_says_before_the_prompts_scores_are_there_waits_for_them(rig):
    run = begin(rig, params=SamplingParams(32, 0.0, num_prompt_logprobs=0))
    await rig.prefill[0].take("start")
    run.emit_started()
    await rig.decode[0].take("reserve")
    run.emit_granted()
    await rig.prefill[0].take("grant")
    run.emit_scores(1, 20)
    run.emit_verified()
    run.emit_token(1, reason="length")
    await run.settle()
    assert run.tokens == []
    run.emit_scores(21, 19)
    run.emit_first()
    assert await run.until(2) == [7, 8]
    await rig.prefill[0].take("release")
    assert await run.end() is None
    assert len(run.live.report.prompt_scores) == len(PROMPT) - 1


async def test_scores_that_the_prefill_worker_never_tells_end_the_attempt(rig):
    run = begin(rig, params=SamplingParams(32, 0.0, num_prompt_logprobs=0))
    await rig.prefill[0].take("start")
    run.emit_started()
    await rig.decode[0].take("reserve")
    run.emit_granted()
    run.emit_scores(1, 20)
    run.emit_verified()
    run.emit_first()
    assert isinstance(await run.end(), TransferFailed)
