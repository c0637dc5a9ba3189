"""What `/cluster` tells: bounded whatever runs, and true of what ran. Ended requests come in order, each once."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from core.clock import VirtualClock
from core.errors import EngineFailed, ModelNotFound, Unavailable
from core.sampling import SamplingParams
from core.worker import Role
from gateway.ask import Ask, Prompt, TextOptions
from gateway.generation import GenerationRequest
from gateway.overview import MAX_SHOWN, overview, to_json
from gateway.recent import MAX_ID_LEN, MAX_RECENT, Recent
from gateway.routing.live import HandoffReport, Live
from gateway.timing import STAGES, Mark, StageClock, Timing
from proto import convert
from proto import session_pb2 as pb
from tests.gateway.peers import LIMIT_S, Worker
from tests.gateway.served import Served

MAX_BYTES = 512 << 10
GREEDY = SamplingParams(1, temperature=0.0)
ASK = Ask("m", (Prompt("prompt", text="hello"),), 32, GREEDY, client_request_id="mine")


def running(num_tokens: int = 50) -> Live:
    request = GenerationRequest(
        tuple(range(num_tokens)), SamplingParams(max_tokens=5), client_request_id="x" * 500
    )
    clock = StageClock()
    clock.mark(Mark.ADMITTED)
    return Live(request, clock, HandoffReport(), asyncio.Event())


def told(served: Served, after: int = 0) -> dict:
    return json.loads(to_json(overview(served.serving, after)))


async def collect(answer) -> list:
    return [chunk async for chunk in answer.chunks()]


async def test_with_a_thousand_running_and_three_hundred_ended_it_stays_small():
    recent = Recent()
    live = {one.request.request_id: one for one in (running() for _ in range(1000))}
    for one in list(live.values())[:300]:
        recent.watch(one)
        one.report.causes += ["worker_lost"] * 3
        recent.add(one, Timing(**one.clock.so_far(), causes=tuple(one.report.causes)))
    fleet = SimpleNamespace(links=[], gone=[], gateway_id="g")
    serving = SimpleNamespace(
        model_id="m", grpc_address="", fleet=fleet, orchestrator=SimpleNamespace(live=live, recent=recent)
    )
    body = to_json(overview(serving))  # type: ignore[arg-type]
    found = json.loads(body)
    assert len(body) < MAX_BYTES
    assert (found["num_requests"], len(found["requests"])) == (1000, MAX_SHOWN)
    assert found["num_by_stage"] == {"queue_s": 1000}
    assert [request["request_id"] for request in found["requests"]] == list(live)[:MAX_SHOWN]
    assert [ended["sequence"] for ended in found["recent"]] == list(range(300, 300 - MAX_RECENT, -1))
    assert len(found["recent"][0]["client_request_id"]) == MAX_ID_LEN
    assert "prompt_ids" not in body.decode()


@pytest.mark.parametrize(("after", "numbers"), [(0, [3, 2, 1]), (2, [3]), (3, []), (9, [])])
async def test_what_was_seen_before_is_left_out(after, numbers):
    recent, live = Recent(), running()
    for _ in range(3):
        recent.add(live, Timing())
    assert [ended.sequence for ended in recent.after(after)] == numbers


async def test_a_request_is_told_while_it_runs_and_after_its_end(served):
    answer = await served.serving.prepare(ASK)
    chunks = asyncio.create_task(collect(answer))
    decode = await served.to_decode("a")
    served.emit(decode, "bc")
    await asyncio.sleep(0.02)
    (live,) = told(served)["requests"]
    assert (live["stage"], live["num_tokens"], live["client_request_id"]) == ("decode_s", 3, "mine")
    assert (live["prefill_worker_id"], live["decode_worker_id"]) == ("p0", "d0")
    assert sum(live["stages"][stage] for stage in STAGES) == pytest.approx(live["age_s"])
    served.emit(decode, "d", "length")
    await chunks
    view = told(served)
    (ended,) = view["recent"]
    assert (view["requests"], view["num_requests"]) == ([], 0)
    assert (ended["outcome"], ended["num_tokens"], ended["num_prompt_tokens"]) == ("length", 4, 5)
    assert sum(ended["timing"][stage] for stage in STAGES) == pytest.approx(ended["timing"]["total_s"])
    assert {worker["record"]["worker_id"] for worker in view["workers"]} == {"p0", "p1", "d0", "d1"}
    assert all(worker["is_up"] and worker["silent_s"] >= 0 for worker in view["workers"])


async def test_a_stop_string_is_told_as_what_ended_it(served):
    answer = await served.serving.prepare(Ask("m", ASK.prompts, 32, GREEDY, text=TextOptions(("cd",))))
    chunks = asyncio.create_task(collect(answer))
    served.emit(await served.to_decode("a"), "bcd")
    await chunks
    assert [ended["outcome"] for ended in told(served)["recent"]] == ["stop"]


async def test_a_client_that_leaves_has_cancelled(served):
    chunks = (await served.serving.prepare(ASK)).chunks()
    first = asyncio.ensure_future(anext(chunks))
    await served.to_decode("a")
    await first
    await chunks.aclose()
    (ended,) = told(served)["recent"]
    assert (ended["outcome"], ended["num_tokens"]) == ("cancelled", 1)


async def test_an_error_is_told_by_its_code(served):
    answer = await served.serving.prepare(ASK)
    failed = asyncio.create_task(collect(answer))
    start = await served.start()
    worker = next(w for w in served.rig.prefill if w.record.worker_id == start.worker.worker_id)
    error = convert.error_to_proto(EngineFailed("broken"))
    worker.emit(failed=pb.Failed(handoff_id=start.handoff_id, error=error))
    with pytest.raises(EngineFailed):
        await failed
    (ended,) = told(served)["recent"]
    assert (ended["outcome"], ended["num_tokens"]) == ("engine_error", 0)


async def test_who_is_refused_is_counted_and_never_ran(served):
    for worker in served.rig.decode:
        lose(served, worker)
    async with asyncio.timeout(LIMIT_S):
        while served.rig.fleet.candidates(Role.DECODE):
            await asyncio.sleep(0.01)
    with pytest.raises(Unavailable):
        await served.serving.prepare(ASK)
    with pytest.raises(ModelNotFound):
        await served.serving.prepare(Ask("other", ASK.prompts))
    rates = served.serving.orchestrator.recent.rates
    assert sum(second.num_refused for second in rates._ring) == 1, "a client's mistake is no refusal"
    assert told(served)["recent"] == []


def lose(served: Served, worker: Worker) -> None:
    served.rig.fleet._registered.discard(worker.record.key)
    worker.hang_up()


async def test_a_worker_that_left_is_told_until_its_id_is_taken_again(served):
    lost = served.rig.decode[1]
    lose(served, lost)
    async with asyncio.timeout(LIMIT_S):
        while not (view := told(served))["gone"]:
            await asyncio.sleep(0.01)
    (gone,) = view["gone"]
    assert (gone["worker_id"], gone["role"], gone["reason"]) == ("d1", "decode", "the session ended")
    served.rig.fleet._follow([lost.record])
    assert told(served)["gone"] == []


def test_a_grant_that_comes_before_the_first_token_is_no_transfer_yet():
    clock = StageClock(VirtualClock())
    stages = [clock.stage]
    for mark in (
        Mark.ADMITTED,
        Mark.STARTED,
        Mark.GRANTED,
        Mark.FIRST_TOKEN,
        Mark.VERIFIED,
        Mark.STEP_BEGAN,
        Mark.SECOND_TOKEN,
    ):
        clock.mark(mark)
        stages.append(clock.stage)
    wanted = ["prepare", "queue", "prefill", "prefill", "transfer", "decode_queue", "first_step", "decode"]
    assert stages == [f"{stage}_s" for stage in wanted]
