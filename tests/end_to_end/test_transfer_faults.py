"""Transfers that are slow, fail, or lose their sender: whoever asked gets right tokens or an error of a known kind,
and decode gets its blocks and places back."""

import asyncio
import json
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable

import grpc
import httpx
import pytest
import pytest_asyncio

from core.worker import Role
from tandem.testing import LocalCluster
from tests.end_to_end.clients import Client, assert_well, make_request, read_counter

pytestmark = pytest.mark.asyncio(loop_scope="module")
rng = random.Random(6)
BLOCK = 16


def faults(**values: object) -> dict[str, str]:
    return {"TANDEM_FAULTS": json.dumps(values)}


SLOW = faults(delay_s=4.0)  # before each stage of a transfer
BEGINS_AFTER_S = 2.5
STAGES = (pytest.param("open", marks=pytest.mark.soak), "send", pytest.param("seal", marks=pytest.mark.soak))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(start_cluster) -> AsyncIterator[LocalCluster]:
    async with start_cluster(environment=SLOW) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster, connect) -> AsyncIterator[Client]:
    async with connect(cluster) as made:
        yield made


def new_prompt(length: int = 60) -> list[int]:
    return [rng.randrange(256) for _ in range(length)]


async def add_prefill(cluster: LocalCluster, **workers: dict[str, str]) -> None:
    """Start workers of these names and environments. Among equals the alphabet decides which is chosen."""
    known = {worker["record"]["worker_id"] for worker in await cluster.workers()}
    for name, environment in workers.items():
        await cluster.add_worker(Role.PREFILL, name, environment=environment)
    await cluster.wait_workers([*known, *workers])


async def remove_prefill(cluster: LocalCluster, name: str) -> None:
    """SIGKILL, and wait until the gateway knows."""
    await cluster.processes[name].kill()
    known = {worker["record"]["worker_id"] for worker in await cluster.workers()}
    await cluster.wait_workers(sorted(known - {name}))


async def wait_blocks(cluster: LocalCluster, name: str, state: str, at_least: int) -> None:
    """Until a worker has so many blocks in that state."""

    async def count() -> int:
        worker = next(w for w in await cluster.workers() if w["record"]["worker_id"] == name)
        return worker["load"]["blocks_by_state"].get(state, 0)

    async with asyncio.timeout(10):
        while await count() < at_least:
            await asyncio.sleep(0.02)


async def num_live(cluster: LocalCluster, *states: str) -> int:
    async with httpx.AsyncClient(base_url=cluster.http) as http:
        live = (await http.get("/cluster")).json()["requests"]
    return sum(request["state"] in states for request in live)


async def code_of(work: Awaitable[object]) -> grpc.StatusCode | None:
    try:
        await work
    except grpc.aio.AioRpcError as error:
        return error.code()
    return None


async def test_a_hundred_requests_that_time_out_in_slow_transfers_leave_every_place_free(
    cluster, client, oracle
):
    """Decode has 16 places; who would wait too long for one may be refused at once."""
    asked = [client.generate(new_prompt(), 8, deadline_s=1.0, ignore_eos=True) for _ in range(100)]
    codes = Counter(await asyncio.gather(*map(code_of, asked)))
    assert set(codes) <= {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert codes[grpc.StatusCode.DEADLINE_EXCEEDED] >= 16
    await cluster.wait_idle(timeout_s=3)
    await add_prefill(cluster, normal=faults())
    await remove_prefill(cluster, "prefill-0")
    prompts = [new_prompt() for _ in range(20)]
    answers = await asyncio.gather(*(client.generate(prompt, 8, ignore_eos=True) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == oracle(prompt, max_tokens=8)
        assert answer.last.timing.num_attempts == 1
    await assert_well(cluster, oracle)


async def test_a_sender_killed_during_a_transfer_costs_that_one_a_retry_and_running_streams_nothing(
    cluster, client, oracle
):
    """The first of nine transfers is slow; the others are over when their sender is killed."""
    await add_prefill(cluster, killed=faults(delay_s=4.0, every=9))
    prompts = [new_prompt() for _ in range(9)]
    streams = [asyncio.create_task(client.generate(prompts[0], 8, ignore_eos=True))]
    await wait_blocks(cluster, "killed", "leased", 4)
    streams += [asyncio.create_task(client.generate(p, 600, ignore_eos=True)) for p in prompts[1:]]
    async with asyncio.timeout(10):
        while await num_live(cluster, "decoding") < 8:
            await asyncio.sleep(0.02)
    assert await num_live(cluster, "receiving") == 1
    await cluster.processes["killed"].kill()
    late, *others = [answer.last.timing for answer in await asyncio.gather(*streams)]
    assert (late.num_attempts, late.prefill_worker_id) == (2, "normal")
    assert {timing.num_attempts for timing in others} == {1}
    assert "killed" in {timing.prefill_worker_id for timing in others}
    lengths = [8, *[600] * 8]
    for prompt, length, stream in zip(prompts, lengths, streams, strict=True):
        assert stream.result().token_ids == oracle(prompt, max_tokens=length)
    await assert_well(cluster, oracle)


async def test_blocks_in_flight_come_back_when_clients_leave_and_senders_die(cluster, client, oracle):
    """Each round takes the whole pool. In the second the senders have begun and cannot say any more that they write
    nothing: the blocks are set apart until they are dead."""
    await add_prefill(cluster, first=SLOW, later=faults(delay_s=BEGINS_AFTER_S))
    for name in ("first", "later"):
        calls = []
        for _ in range(3):
            request = make_request(new_prompt(81 * BLOCK), 8, ignore_eos=True)
            calls.append(client.stub.GenerateStream(request))
            await wait_blocks(cluster, name, "leased", 81 * len(calls))
        await wait_blocks(cluster, "decode-0", "in_flight", 81 * 3)
        if name == "later":
            await asyncio.sleep(BEGINS_AFTER_S + 0.5)
            cluster.processes[name].signal_all(signal.SIGSTOP)
        for call in calls:
            call.cancel()
        if name == "later":
            await wait_blocks(cluster, "decode-0", "quarantined", 81 * 3)
        await remove_prefill(cluster, name)
        await cluster.wait_idle(timeout_s=20)
    await assert_well(cluster, oracle)


@pytest.mark.parametrize("stage", STAGES)
async def test_a_transfer_that_fails_is_made_up_for_and_the_retry_counted(cluster, client, oracle, stage):
    await add_prefill(cluster, failing=faults(fails_at=stage, every=2))
    before = await read_counter(cluster, "tandem_retries_total", cause="transfer_failed")
    for prompt in (new_prompt(), new_prompt(300)):
        answer = await client.generate(prompt, 8, ignore_eos=True)
        assert answer.token_ids == oracle(prompt, max_tokens=8)
        timing = answer.last.timing
        assert (timing.num_attempts, list(timing.causes)) == (2, ["transfer_failed"])
        assert timing.prefill_worker_id == "failing"
    assert await read_counter(cluster, "tandem_retries_total", cause="transfer_failed") - before == 2
    assert f"a fault was injected at {stage}" in cluster.processes["failing"].tail()
    await remove_prefill(cluster, "failing")
    await assert_well(cluster, oracle)
