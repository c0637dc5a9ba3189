"""One prefix cache across the cluster: what was computed anywhere is not computed again, and tokens stay the same."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from click.testing import CliRunner
from redis.asyncio import Redis

from tandem.cli import main
from tandem.testing import LocalCluster
from tests.end_to_end.clients import Client, assert_well, indexed, read_counter, wait_indexed

pytestmark = pytest.mark.asyncio(loop_scope="module")
rng = random.Random(7)
BLOCK = 16


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(start_cluster) -> AsyncIterator[LocalCluster]:
    async with start_cluster(num_prefill=2, num_decode=2) as running:
        await running.wait_workers(["prefill-0", "prefill-1", "decode-0", "decode-1"])
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster, connect) -> AsyncIterator[Client]:
    async with connect(cluster) as made:
        yield made


def tokens(count: int) -> list[int]:
    return [rng.randrange(256) for _ in range(count)]


async def test_each_turn_of_a_chat_computes_what_is_new(cluster, client, oracle):
    """Prompt and answer of all turns before are found where they were generated."""
    told = await indexed(cluster)
    prompt, num_known = tokens(100), 0
    for turn in range(10):
        answer = await client.generate(prompt, 24, ignore_eos=True)
        assert answer.token_ids == oracle(prompt, max_tokens=24)
        assert answer.usage.num_cached_tokens == num_known
        if turn:
            assert list(answer.last.timing.causes) == ["cached_on_decode"]
        prompt += answer.token_ids
        num_blocks = (len(prompt) - 1) // BLOCK  # the KV of the last token is never computed
        await wait_indexed(cluster, num_blocks, told)
        num_known = num_blocks * BLOCK
        prompt += tokens(20)
    missing = await read_counter(cluster, "tandem_prefix_index_error_tokens_total", kind="missing")
    assert missing == 0
    await assert_well(cluster, oracle)


async def test_a_burst_with_one_prefix_lands_together_before_it_is_computed(cluster, client, oracle):
    """Nobody has told of the prefix when they are routed."""
    shared = tokens(200)
    prompts = [shared + tokens(10) for _ in range(6)]
    answers = await asyncio.gather(*(client.generate(ids, 8, ignore_eos=True) for ids in prompts))
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == oracle(ids, max_tokens=8)
    assert len({answer.last.timing.prefill_worker_id for answer in answers}) == 1
    await assert_well(cluster, oracle)


async def test_the_gateway_knows_what_it_knew_when_redis_has_lost_it(cluster, client, oracle):
    told = await indexed(cluster)
    prompt = tokens(20 * BLOCK + 1)
    await client.generate(prompt, 1)
    await wait_indexed(cluster, 20, told)
    async with Redis.from_url(cluster.redis_url) as redis:
        await redis.flushall()
    answer = await client.generate(prompt, 8, ignore_eos=True)
    assert answer.usage.num_cached_tokens == 20 * BLOCK
    assert answer.token_ids == oracle(prompt, max_tokens=8)
    await assert_well(cluster, oracle)


async def test_a_flushed_cache_finds_nothing_and_what_runs_goes_on(cluster, client, oracle):
    told = await indexed(cluster)
    prompt, running = tokens(10 * BLOCK + 1), tokens(60)
    await client.generate(prompt, 1)
    await wait_indexed(cluster, 10, told)
    stream = asyncio.create_task(client.generate(running, 400, ignore_eos=True))
    await asyncio.sleep(0.3)
    result = await asyncio.to_thread(CliRunner().invoke, main, ["flush", "--url", cluster.http])
    assert (result.exit_code, result.output) == (0, "told decode-0, decode-1, prefill-0, prefill-1\n")
    answer = await client.generate(prompt, 8, ignore_eos=True)
    assert answer.usage.num_cached_tokens == 0
    assert answer.token_ids == oracle(prompt, max_tokens=8)
    assert (await stream).token_ids == oracle(running, max_tokens=400)
    again = await client.generate(prompt, 8, ignore_eos=True)
    assert again.usage.num_cached_tokens == 10 * BLOCK, "it is cached anew"
    await assert_well(cluster, oracle)


async def test_a_flush_that_nobody_hears_is_an_error():
    result = await asyncio.to_thread(CliRunner().invoke, main, ["flush", "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 1
    assert "http://127.0.0.1:1" in result.output


async def test_another_gateway_finds_what_was_there_before_it(cluster, client, oracle):
    """It hears of nothing: it reads what workers hold."""
    told = await indexed(cluster)
    prompt = tokens(10 * BLOCK + 1)
    first = await client.generate(prompt, 1)
    await wait_indexed(cluster, 10, told)
    await cluster.processes["gateway"].stop()
    await cluster.start_gateway()
    async with asyncio.timeout(10):
        while await read_counter(cluster, "tandem_prefix_index_snapshots_total", cause="met") < 4:
            await asyncio.sleep(0.02)
    async with grpc.aio.insecure_channel(cluster.grpc) as channel:
        answer = await Client(channel).generate(prompt, 8, ignore_eos=True)
    assert answer.usage.num_cached_tokens == 10 * BLOCK
    assert answer.last.timing.prefill_worker_id == first.last.timing.prefill_worker_id
    await assert_well(cluster, oracle)


async def test_hits_stay_while_redis_is_flushed_stopped_and_paused_and_come_back_to_a_gateway_that_knows_nothing(
    cluster, client, oracle
):
    """A replay of prompts with a past, over and over: right tokens and every block found, whatever Redis does; then
    the gateway goes as well, and all that it knew is back from what workers write to an empty Redis."""
    told = await indexed(cluster)
    prompts = [tokens(12 * BLOCK + 5) for _ in range(6)]
    expected = [oracle(ids, max_tokens=4) for ids in prompts]

    async def replay(by: Client) -> int:
        answers = await asyncio.gather(*(by.generate(ids, 4, ignore_eos=True) for ids in prompts))
        assert [answer.token_ids for answer in answers] == expected
        return sum(answer.usage.num_cached_tokens for answer in answers)

    whole = 6 * 12 * BLOCK
    assert await replay(client) == 0
    await wait_indexed(cluster, 6 * 12, told)
    assert await replay(client) == whole
    async with Redis.from_url(cluster.redis_url) as redis:
        await redis.flushall()
    assert await replay(client) == whole
    os.kill(cluster.valkey.pid, signal.SIGSTOP)
    try:
        assert await replay(client) == whole
    finally:
        os.kill(cluster.valkey.pid, signal.SIGCONT)
    assert await replay(client) == whole
    await cluster.stop_valkey()
    assert await replay(client) == whole
    await cluster.start_valkey()
    assert await replay(client) == whole
    known = await indexed(cluster)
    await cluster.processes["gateway"].stop()
    await cluster.start_gateway()
    await cluster.wait_workers(["prefill-0", "prefill-1", "decode-0", "decode-1"])
    await wait_indexed(cluster, 0, known)
    async with grpc.aio.insecure_channel(cluster.grpc) as channel:
        assert await replay(Client(channel)) == whole
    await assert_well(cluster, oracle)
