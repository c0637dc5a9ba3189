"""A generation from prompt to last chunk: retries, stops, early ends, and what is counted of them."""

import asyncio
from typing import Any

import pytest

from core.block_hash import cache_salt, hash_chain
from core.errors import (
    EngineFailed,
    InvalidRequest,
    ModelNotFound,
    TandemError,
    TransferFailed,
    Unavailable,
    WorkerLost,
)
from core.sampling import SamplingParams
from gateway.answer import MAX_AT_ONCE, Answer
from gateway.ask import Arrival, Ask, Prompt, TextOptions
from gateway.routing.fleet import Fleet
from gateway.routing.orchestrator import MAX_ATTEMPTS
from gateway.serving import MAX_PROMPT_SCORES
from gateway.text_generation import TextChunk
from proto import convert
from proto import session_pb2 as pb
from proto import types_pb2 as types
from tests.gateway.peers import LIMIT_S, Worker

GREEDY = SamplingParams(1, temperature=0.0)
ASK = Ask("m", (Prompt("prompt", text="hello"),), 8, GREEDY)


def collect(generation: Answer) -> "asyncio.Task[list[TextChunk]]":
    async def gather() -> list[TextChunk]:
        async with asyncio.timeout(LIMIT_S):
            return [chunk async for chunk in generation.chunks()]

    return asyncio.create_task(gather())


async def test_chunks_are_the_text_and_the_last_has_the_reason(served):
    generation = await served.serving.prepare(ASK)
    chunks = collect(generation)
    decode = await served.to_decode("a")
    served.emit(decode, "bcd", "length")
    parts = await chunks
    assert "".join(part.text for part in parts) == "abcd"
    assert [part.finish_reason for part in parts] == ["", "", "", "length"]
    assert generation.usage.num_completion_tokens == 4
    assert served.outcomes() == {"length": 1}


async def test_a_stop_string_ends_both_tiers_work_and_what_came_after_is_not_counted(served):
    generation = await served.serving.prepare(
        Ask("m", (Prompt("prompt", text="x"),), 32, text=TextOptions(("cd",)))
    )
    chunks = collect(generation)
    decode = await served.to_decode("a")
    served.emit(decode, "bcdefg")
    parts = await chunks
    assert "".join(part.text for part in parts) == "ab"
    assert parts[-1].finish_reason == "stop"
    assert generation.usage.num_completion_tokens == 4
    await decode.take("abort")


async def test_a_consumer_that_stops_early_has_aborted_when_close_returns(served):
    generation = await served.serving.prepare(ASK)
    chunks = generation.chunks()
    first = asyncio.ensure_future(anext(chunks))
    decode = await served.to_decode("a")
    assert (await first).text == "a"
    assert len(served.serving.orchestrator.live) == 1
    await chunks.aclose()
    served.rig.assert_clean()
    assert not served.serving.orchestrator.live
    assert served.outcomes() == {"cancelled": 1}
    await decode.take("abort")


async def test_a_stream_goes_on_where_it_was_after_its_decode_worker_was_lost(served):
    generation = await served.serving.prepare(ASK)
    chunks = collect(generation)
    decode = await served.to_decode("a")
    served.emit(decode, "bc")
    await asyncio.sleep(0.01)
    served.rig.fleet._registered.discard(decode.record.key)
    decode.hang_up()
    second, again = served.rig.decode[1], await served.start()
    assert bytes(again.output_ids) == b"abc"
    prefill = next(w for w in served.rig.prefill if w.record.worker_id == again.worker.worker_id)
    prefill.emit(started=pb.PrefillStarted(handoff_id=again.handoff_id, num_output_ids=3))
    await second.take("reserve")
    second.emit(granted=pb.DecodeGranted(grant=types.Grant(handoff_id=again.handoff_id)))
    token = types.FirstToken(token_id=ord("d"), position=3)
    second.emit(seal_verified=pb.DecodeSealVerified(handoff_id=again.handoff_id, first_tokens=[token]))
    served.handoff_id, served.position = again.handoff_id, 3
    served.emit(second, "e", "length")
    assert "".join(part.text for part in await chunks) == "abcde"
    assert generation.timing().num_attempts == 2
    assert generation.timing().causes == ("worker_lost",)


async def test_the_retry_budget_ends(served):
    generation = await served.serving.prepare(ASK)
    chunks = collect(generation)
    prefill, other = served.rig.prefill
    assert MAX_ATTEMPTS == 3
    for worker, takes_over in ((prefill, 0), (prefill, 1), (other, 0)):
        start = await worker.take("start")
        assert start.takes_over == takes_over
        error = convert.error_to_proto(TransferFailed("digest"))
        worker.emit(failed=pb.Failed(handoff_id=start.handoff_id, error=error))
        if takes_over or worker is other:
            await worker.take("abort")
    with pytest.raises(TransferFailed):
        await chunks
    assert served.outcomes() == {"transfer_failed": 1}
    assert not served.serving.orchestrator.live


async def test_blocks_of_a_prompt_whose_decode_worker_died_are_sent_to_another(served):
    """Nothing is computed again, and the first token that the client has is not repeated."""
    generation = await served.serving.prepare(ASK)
    chunks = collect(generation)
    start = await served.start()
    prefill = next(w for w in served.rig.prefill if w.record.worker_id == start.worker.worker_id)
    first, second = served.rig.decode
    prefill.emit(started=pb.PrefillStarted(handoff_id=start.handoff_id))
    await first.take("reserve")
    first.emit(granted=pb.DecodeGranted(grant=types.Grant(handoff_id=start.handoff_id)))
    await prefill.take("grant")
    token = types.FirstToken(token_id=ord("a"), position=0)
    prefill.emit(first_token=pb.PrefillFirstToken(handoff_id=start.handoff_id, first_tokens=[token]))
    await asyncio.sleep(0.01)
    served.rig.fleet._registered.discard(first.record.key)
    first.hang_up()
    again = await prefill.take("start")
    assert (again.takes_over, bytes(again.output_ids)) == (1, b"a")
    prefill.emit(started=pb.PrefillStarted(handoff_id=again.handoff_id, num_output_ids=0))
    prefill.emit(first_token=pb.PrefillFirstToken(handoff_id=again.handoff_id, first_tokens=[token]))
    assert list((await second.take("reserve")).output_ids) == []
    second.emit(granted=pb.DecodeGranted(grant=types.Grant(handoff_id=again.handoff_id)))
    await prefill.take("grant")
    second.emit(seal_verified=pb.DecodeSealVerified(handoff_id=again.handoff_id, first_tokens=[token]))
    await prefill.take("release")
    served.handoff_id, served.position = again.handoff_id, 0
    served.emit(second, "bc", "length")
    assert "".join(part.text for part in await chunks) == "abc"
    assert generation.timing().num_attempts == 2
    assert served.num_resends == 1


async def test_a_client_that_leaves_between_two_attempts_gives_the_blocks_back(served):
    generation = await served.serving.prepare(ASK)
    chunks = collect(generation)
    start = await served.start()
    prefill = next(w for w in served.rig.prefill if w.record.worker_id == start.worker.worker_id)
    error = convert.error_to_proto(TransferFailed("digest"))
    prefill.emit(failed=pb.Failed(handoff_id=start.handoff_id, error=error))
    await asyncio.sleep(0.02)
    chunks.cancel()
    await asyncio.gather(chunks, return_exceptions=True)
    assert (await prefill.take("abort")).handoff_id == start.handoff_id


async def test_a_request_that_ran_on_two_workers_as_they_died_is_not_tried_a_third_time(served):
    chunks = collect(await served.serving.prepare(ASK))
    for worker in served.rig.decode:
        await served.to_decode("a" if worker is served.rig.decode[0] else "b", worker)
        await asyncio.sleep(0.01)
        served.rig.fleet._registered.discard(worker.record.key)
        worker.hang_up()
    with pytest.raises(WorkerLost):
        await chunks


async def test_an_error_that_no_retry_mends_ends_at_once(served):
    chunks = collect(await served.serving.prepare(ASK))
    start = await served.start()
    prefill = next(w for w in served.rig.prefill if w.record.worker_id == start.worker.worker_id)
    error = convert.error_to_proto(EngineFailed("NaN"))
    prefill.emit(failed=pb.Failed(handoff_id=start.handoff_id, error=error))
    with pytest.raises(EngineFailed):
        await chunks


async def test_an_abort_by_either_id_ends_the_request(served):
    ask = Ask("m", (Prompt("prompt", text="x"),), 8, client_request_id="mine")
    for by_client in (True, False):
        generation = await served.serving.prepare(ask)
        chunks = collect(generation)
        start = await served.start()
        orchestrator = served.serving.orchestrator
        assert not orchestrator.abort("")
        assert orchestrator.abort("mine" if by_client else generation.request_id)
        with pytest.raises(TandemError, match="aborted"):
            await chunks
        assert not orchestrator.abort("mine")
        prefill = next(w for w in served.rig.prefill if w.record.worker_id == start.worker.worker_id)
        await prefill.take("abort")


async def test_a_request_of_another_tenant_cannot_be_aborted(served):
    arrival = Arrival(tenant="a")
    ask = Ask("m", (Prompt("prompt", text="x"),), 8, client_request_id="mine")
    generation = await served.serving.prepare(ask, arrival)
    chunks = collect(generation)
    start = await served.start()
    orchestrator = served.serving.orchestrator
    for tenant in ("b", ""):
        assert not orchestrator.abort("mine", tenant)
        assert not orchestrator.abort(generation.request_id, tenant)
    assert orchestrator.abort("mine", "a")
    with pytest.raises(TandemError, match="aborted"):
        await chunks
    prefill = next(w for w in served.rig.prefill if w.record.worker_id == start.worker.worker_id)
    await prefill.take("abort")


async def test_every_choice_and_attempt_has_the_salt_of_its_tenant_and_request(served):
    """Whether it is computed, reserved, or computed anew after a worker's failure."""
    ask = Ask("m", (Prompt("prompt", text="hello" * 20),), 8, GREEDY, n=2, best_of=2, cache_salt="s")
    expected = cache_salt("a", "s")
    whole = asyncio.create_task((await served.serving.prepare(ask, Arrival(tenant="a"))).whole())
    prefill, failed = await next_of(served.rig.prefill, "start")
    for live in served.serving.orchestrator.live.values():
        assert live.request.chain == tuple(hash_chain(live.request.prompt_ids, "m", salt=expected))
    error = convert.error_to_proto(WorkerLost("gone"))
    prefill.emit(failed=pb.Failed(handoff_id=failed.handoff_id, error=error))
    salts = [failed.cache_salt]
    for token in "ab":
        prefill, start = await next_of(served.rig.prefill, "start")
        prefill.emit(started=pb.PrefillStarted(handoff_id=start.handoff_id))
        _, reserve = await next_of(served.rig.decode, "reserve")
        salts += [start.cache_salt, reserve.cache_salt]
        emit_only_token(prefill, start, token)
    await whole
    assert salts == [expected] * 5


async def test_an_abort_ends_the_choices_that_outlive_the_first(served):
    """The answer's id is that of its first choice, which has ended here."""
    answer = await served.serving.prepare(Ask("m", (Prompt("prompt", text="x"),), 8, GREEDY, n=2, best_of=2))
    chunks = collect(answer)
    prefill, start = await next_of(served.rig.prefill, "start")
    prefill.emit(started=pb.PrefillStarted(handoff_id=start.handoff_id))
    emit_only_token(prefill, start, "a")
    prefill, _ = await next_of(served.rig.prefill, "start")
    assert len(served.serving.orchestrator.live) == 1
    assert served.serving.orchestrator.abort(answer.request_id)
    with pytest.raises(TandemError, match="aborted"):
        await chunks
    await next_of([prefill], "abort")


REFUSED: dict[str, tuple[Ask, type[TandemError]]] = {
    "a model": (Ask("other", (Prompt("prompt", text="x"),)), ModelNotFound),
    "no text": (Ask("m", (Prompt("prompt", text=""),)), InvalidRequest),
    "no ids": (
        Ask("m", (Prompt("prompt", token_ids=()),)),
        InvalidRequest,
    ),
    "an id beyond the workers' vocabulary": (
        Ask("m", (Prompt("prompt", token_ids=(300,)),)),
        InvalidRequest,
    ),
    "a stop id beyond it": (
        Ask("m", (Prompt("prompt", text="x"),), sampling=SamplingParams(1, stop_token_ids=(300,))),
        InvalidRequest,
    ),
    "a prompt as long as the context": (Ask("m", (Prompt("prompt", token_ids=(1,) * 512),)), InvalidRequest),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_depends_on_the_model_is_refused_before_any_work(served, name):
    ask, kind = REFUSED[name]
    with pytest.raises(kind) as caught:
        await served.serving.prepare(ask)
    assert served.outcomes() == {caught.value.code.value: 1}
    assert all(worker.commands.empty() for worker in served.rig.workers)


async def test_of_a_long_list_of_ids_its_length_is_told_before_any_id_is_looked_at(served):
    too_long = Ask("m", (Prompt("prompt", token_ids=(2**31,) * 513),), 8, GREEDY)
    with pytest.raises(InvalidRequest, match="513 tokens"):
        await served.serving.prepare(too_long)
    with pytest.raises(InvalidRequest, match="513 tokens") as caught:
        await served.serving.detokenize([2**31] * 513)
    assert caught.value.field == "tokens"


@pytest.mark.parametrize(("echoes", "field"), [(True, "logprobs"), (False, "prompt_logprobs")])
async def test_more_scores_than_an_answer_can_hold_are_refused(served, echoes, field):
    prompts = (Prompt("prompt", token_ids=(1,) * 500),) * (MAX_PROMPT_SCORES // (500 * 21) + 1)
    sampling = SamplingParams(1, num_prompt_logprobs=20)
    asked = Ask("m", prompts, 8, sampling, echoes=echoes, wants_logprobs=echoes)
    with pytest.raises(InvalidRequest, match="1050000 log-probabilities") as caught:
        await served.serving.prepare(asked)
    assert caught.value.field == field


async def test_an_output_is_cut_to_the_context(served):
    answer = await served.serving.prepare(Ask("m", (Prompt("prompt", token_ids=(1,) * 500),), 1000))
    chunks = collect(answer)
    start = await served.start()
    assert start.sampling.max_tokens == 12
    chunks.cancel()


async def test_without_a_decode_worker_the_service_is_unavailable(served):
    for worker in served.rig.decode:
        worker.hang_up()
    for _ in range(20):
        await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        await served.serving.prepare(ASK)


async def test_workers_that_vanish_between_admission_and_routing_are_lost_ones(served):
    generation = await served.serving.prepare(ASK)
    for worker in served.rig.workers:
        worker.hang_up()
    for _ in range(20):
        await asyncio.sleep(0)
    fleet: Fleet = served.rig.fleet
    fleet._registered = set()
    with pytest.raises(WorkerLost):
        await collect(generation)


async def next_of(workers: list[Worker], kind: str) -> Any:
    """The next command of that kind that reaches any of them; others are passed over."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            for worker in workers:
                while not worker.commands.empty():
                    command = worker.commands.get_nowait()
                    if command.WhichOneof("command") == kind:
                        return worker, getattr(command, kind)
            await asyncio.sleep(0.005)


def emit_only_token(prefill: Worker, start: pb.PrefillStart, text: str) -> None:
    """The started prompt is computed, and its first token ends the choice."""
    token = types.FirstToken(token_id=ord(text), finish_reason=convert.FINISH_REASONS["length"])
    prefill.emit(first_token=pb.PrefillFirstToken(handoff_id=start.handoff_id, first_tokens=[token]))


async def test_of_many_choices_only_some_run_at_a_time_and_the_next_begins_when_one_ends(served):
    num_choices = MAX_AT_ONCE + 3
    ask = Ask("m", (Prompt("prompt", text="x"),), 1, n=num_choices, best_of=num_choices)
    whole = asyncio.create_task((await served.serving.prepare(ask)).whole())
    for _ in range(num_choices):
        prefill, start = await next_of(served.rig.prefill, "start")
        assert len(served.serving.orchestrator.live) <= MAX_AT_ONCE
        prefill.emit(started=pb.PrefillStarted(handoff_id=start.handoff_id))
        emit_only_token(prefill, start, "a")
    assert ["".join(chunk.text for chunk in chunks) for chunks in await whole] == ["a"] * num_choices
    assert served.outcomes() == {"length": 1}


async def test_a_follower_waits_for_its_leaders_blocks_and_goes_where_they_are(served):
    ask = Ask("m", (Prompt("prompt", text="hello" * 20),), 8, GREEDY, n=2, best_of=2)
    whole = asyncio.create_task((await served.serving.prepare(ask)).whole())
    decode = await served.to_decode("a", served.rig.decode[0])
    leader = served.handoff_id
    prefill, start = await next_of(served.rig.prefill, "start")
    assert start.handoff_id.request_id != leader.request_id
    prefill.emit(started=pb.PrefillStarted(handoff_id=start.handoff_id))
    _, reserve = await next_of([decode], "reserve")
    assert reserve.handoff_id == start.handoff_id
    served.emit(decode, "b", "length")
    emit_only_token(prefill, start, "c")
    texts = ["".join(chunk.text for chunk in chunks) for chunks in await whole]
    assert texts == ["ab", "c"]


async def test_a_choice_that_fails_ends_the_others(served):
    ask = Ask("m", (Prompt("prompt", text="hello"),), 8, GREEDY, n=2, best_of=2)
    whole = asyncio.create_task((await served.serving.prepare(ask)).whole())
    decode = await served.to_decode("a", served.rig.decode[0])
    prefill, start = await next_of(served.rig.prefill, "start")
    error = types.Error(code="engine_error", message="no")
    prefill.emit(failed=pb.Failed(handoff_id=start.handoff_id, error=error))
    with pytest.raises(EngineFailed):
        await whole
    await next_of([decode], "abort")
    assert served.outcomes() == {"engine_error": 1}
    assert not served.serving.orchestrator.live
