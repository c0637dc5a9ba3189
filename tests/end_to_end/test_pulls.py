"""Prefixes are moved to where prompts are computed: nothing is computed twice anywhere, and tokens stay the same."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tandem.testing import LocalCluster
from tests.end_to_end.clients import Client, assert_well, indexed, read_counter, wait_indexed

pytestmark = pytest.mark.asyncio(loop_scope="module")
rng = random.Random(11)
BLOCK = 16


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(start_cluster) -> AsyncIterator[LocalCluster]:
    """Decode workers that compute no prompts, and a model so small that no pull would pay if it cost anything."""
    async with start_cluster(
        num_prefill=2,
        num_decode=2,
        decode_arguments=("--max-local-tokens", "0"),
        gateway_arguments=("--pull-cost", "0"),
    ) as running:
        await running.wait_workers(["prefill-0", "prefill-1", "decode-0", "decode-1"])
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster, connect) -> AsyncIterator[Client]:
    async with connect(cluster) as made:
        yield made


def tokens(count: int) -> list[int]:
    return [rng.randrange(256) for _ in range(count)]


async def pulled(cluster: LocalCluster) -> float:
    return await read_counter(cluster, "tandem_prefix_pulled_tokens_total")


async def test_each_turn_of_a_chat_computes_what_is_new_wherever_it_lands(cluster, client, oracle):
    """The worker that computed five turns goes; the next one has the sixth's past from where it was generated."""
    told = await indexed(cluster)
    prompt, num_known, homes = tokens(100), 0, set()
    for turn in range(10):
        answer = await client.generate(prompt, 24, ignore_eos=True)
        timing = answer.last.timing
        assert answer.token_ids == oracle(prompt, max_tokens=24)
        assert answer.usage.num_cached_tokens == num_known
        assert list(timing.causes) == []
        homes.add(timing.prefill_worker_id)
        prompt += answer.token_ids
        num_blocks = (len(prompt) - 1) // BLOCK
        await wait_indexed(cluster, num_blocks, told)
        num_known = num_blocks * BLOCK
        prompt += tokens(20)
        if turn == 4:
            assert len(homes) == 1
            assert await pulled(cluster) > 0
            await cluster.processes[timing.prefill_worker_id].stop()
            await cluster.wait_workers({"prefill-0", "prefill-1", "decode-0", "decode-1"} - homes)
    assert len(homes) == 2
    assert await read_counter(cluster, "tandem_prefix_pulled_bytes_total", connector="shm") > 0
    await cluster.processes[sorted(homes)[0]].stop()  # idempotent: whichever went is started again below
    for name in homes:
        if cluster.processes[name].process.returncode is not None:
            await cluster.processes[name].start()
    await cluster.wait_workers(["prefill-0", "prefill-1", "decode-0", "decode-1"])
    await assert_well(cluster, oracle)


async def test_a_burst_waits_for_one_pull_of_what_it_shares(cluster, client, oracle):
    told, before = await indexed(cluster), await pulled(cluster)
    first = tokens(10)
    answer = await client.generate(first, 150, ignore_eos=True)
    shared = first + answer.token_ids
    num_blocks = (len(shared) - 1) // BLOCK
    await wait_indexed(cluster, num_blocks, told)
    prompts = [shared + tokens(5) for _ in range(6)]
    answers = await asyncio.gather(*(client.generate(ids, 8, ignore_eos=True) for ids in prompts))
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == oracle(ids, max_tokens=8)
        assert answer.usage.num_cached_tokens >= num_blocks * BLOCK
    assert await pulled(cluster) == before + num_blocks * BLOCK
    await assert_well(cluster, oracle)


async def test_a_source_that_stands_still_costs_a_computation_and_is_told(cluster, client, oracle):
    told = await indexed(cluster)
    prompt = tokens(10)
    first = await client.generate(prompt, 150, ignore_eos=True)
    prompt += first.token_ids + tokens(3)
    await wait_indexed(cluster, (len(prompt) - 4) // BLOCK, told)
    source = cluster.processes[first.last.timing.decode_worker_id]
    source.signal_all(signal.SIGSTOP)
    try:
        answer = await client.generate(prompt, 8, ignore_eos=True)
    finally:
        source.signal_all(signal.SIGCONT)
    assert answer.token_ids == oracle(prompt, max_tokens=8)
    assert "pull_failed" in list(answer.last.timing.causes)
    await cluster.wait_workers(["prefill-0", "prefill-1", "decode-0", "decode-1"])
    await assert_well(cluster, oracle)
