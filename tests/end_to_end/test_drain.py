"""SIGTERM to workers that are at work: what they have they finish or others do, what is new goes elsewhere."""

import asyncio
import random
import time
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from core.worker import Role
from tandem.testing import LocalCluster
from tests.end_to_end.clients import Answer, Client, assert_well

pytestmark = pytest.mark.asyncio(loop_scope="module")
rng = random.Random(82)
PLACES = 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(start_cluster) -> AsyncIterator[LocalCluster]:
    async with start_cluster(num_decode=2, worker_arguments=("--max-batch", str(PLACES))) as running:
        await running.wait_workers(["prefill-0", "decode-0", "decode-1"])
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster, connect) -> AsyncIterator[Client]:
    async with connect(cluster) as made:
        yield made


class Streams:
    """Long streams of new prompts, asked for together."""

    def __init__(self, client: Client, count: int, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.prompts = [[rng.randrange(256) for _ in range(50)] for _ in range(count)]
        self._tasks = [
            asyncio.create_task(client.generate(prompt, max_tokens, ignore_eos=True))
            for prompt in self.prompts
        ]

    async def assert_right(self, oracle) -> list[Answer]:
        answers = await asyncio.gather(*self._tasks)
        for prompt, answer in zip(self.prompts, answers, strict=True):
            assert answer.token_ids == oracle(prompt, max_tokens=self.max_tokens)
        return answers


async def wait_states(cluster: LocalCluster, **counts: int) -> None:
    """Until so many requests, or more, are in each state: one that is suspended lets another in."""
    async with asyncio.timeout(20), httpx.AsyncClient(base_url=cluster.http) as http:
        while True:
            states = [r["state"] for r in (await http.get("/cluster")).json()["requests"]]
            if all(states.count(state) >= count for state, count in counts.items()):
                return
            await asyncio.sleep(0.02)


async def test_a_drain_that_takes_too_long_leaves_its_streams_to_another_worker(cluster, client, oracle):
    await cluster.add_worker(Role.DECODE, "a-hasty-one", ("--drain", "0.1"))
    await cluster.wait_workers(["prefill-0", "decode-0", "decode-1", "a-hasty-one"])
    streams = Streams(client, 2, 1500)
    await wait_states(cluster, decoding=2)
    began_s = time.monotonic()
    assert await cluster.processes["a-hasty-one"].stop() == 0
    assert time.monotonic() - began_s < 10
    answers = await streams.assert_right(oracle)
    moved = [answer for answer in answers if answer.last.timing.num_attempts > 1]
    assert moved
    assert {answer.last.timing.decode_worker_id for answer in answers} <= {"decode-0", "decode-1"}
    await assert_well(cluster, oracle)


async def test_a_decode_worker_that_is_told_to_stop_finishes_what_it_has_and_gets_nothing_new(
    cluster, client, oracle
):
    """More streams than fit: the last ones wait in a queue."""
    streams = Streams(client, 2 * PLACES + 2, 1200)
    await wait_states(cluster, decoding=2 * PLACES)
    stopping = asyncio.create_task(cluster.processes["decode-0"].stop())
    await asyncio.sleep(0.5)
    assert not stopping.done()
    later = Streams(client, 2, 20)  # no more than are let in when no end was seen for long
    cluster.processes["decode-0"].process.terminate()
    assert await stopping == 0
    answers = await streams.assert_right(oracle)
    assert {answer.last.timing.num_attempts for answer in answers} == {1}
    assert {answer.last.timing.decode_worker_id for answer in answers} == {"decode-0", "decode-1"}
    new = await later.assert_right(oracle)
    assert {answer.last.timing.decode_worker_id for answer in new} == {"decode-1"}
    await assert_well(cluster, oracle)


async def test_blocks_that_wait_for_decode_are_fetched_before_their_prefill_worker_exits(
    cluster, client, oracle
):
    streams = Streams(client, 2 * PLACES, 900)
    await wait_states(cluster, decoding=PLACES, pending=PLACES // 2)
    stopping = asyncio.create_task(cluster.processes["prefill-0"].stop())
    await asyncio.sleep(0.3)
    assert not stopping.done()
    cluster.processes["prefill-0"].process.terminate()
    assert await stopping == 0
    answers = await streams.assert_right(oracle)
    assert {answer.last.timing.num_attempts for answer in answers} == {1}
    assert {answer.last.timing.prefill_worker_id for answer in answers} == {"prefill-0"}
    await assert_well(cluster, oracle)
