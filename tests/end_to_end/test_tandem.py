"""Many requests through real workers: right tokens, blocks back, Redis clean, bytes and times that add up."""

import asyncio
import random
import re
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from tandem.testing import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")
BLOCK = 16
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # layers, K and V, heads, head_dim, float32


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[(1, 2), (2, 1)], ids=["1+2", "2+1"])
async def cluster(request, start_cluster) -> AsyncIterator[LocalCluster]:
    num_prefill, num_decode = request.param
    async with start_cluster(num_prefill=num_prefill, num_decode=num_decode) as running:
        await running.wait_workers(
            [f"prefill-{i}" for i in range(num_prefill)] + [f"decode-{i}" for i in range(num_decode)]
        )
        yield running


async def test_sixteen_streams_of_mixed_length_are_right_and_leave_nothing_behind(cluster, connect, oracle):
    rng = random.Random(16)
    lengths = [1, 15, 16, 17, 33, 64, 127, 128, 129, 200, 300, 500, 3, 40, 90, 250]
    prompts = [[rng.randrange(256) for _ in range(length)] for length in lengths]
    outputs = [rng.randrange(1, 48) for _ in prompts]
    async with connect(cluster) as client:
        answers = await asyncio.gather(
            *(client.generate(p, n) for p, n in zip(prompts, outputs, strict=True))
        )
    for prompt, num_tokens, answer in zip(prompts, outputs, answers, strict=True):
        assert answer.token_ids == oracle(prompt, max_tokens=num_tokens), len(prompt)
        assert answer.usage.num_completion_tokens == num_tokens
    await cluster.wait_idle()
    workers = {answer.last.timing.decode_worker_id for answer in answers}
    assert len(workers - {""}) == sum(w["record"]["role"] == "decode" for w in await cluster.workers())


async def test_redis_holds_only_live_workers_their_index_and_the_capped_stream(cluster, connect):
    async with connect(cluster) as client:
        await client.generate(list(range(100)), 4)
    await cluster.wait_idle()
    await asyncio.sleep(0.5)  # the index is published in batches
    async with asyncio.timeout(5), Redis.from_url(cluster.redis_url) as redis:
        while kinds_with_handoffs := [key async for key in redis.scan_iter("tandem:{default}:handoff:*")]:
            await asyncio.sleep(0.05)
        assert not kinds_with_handoffs
        workers = {w["record"]["worker_id"]: w["record"]["epoch"] for w in await cluster.workers()}
        keys = {key.removeprefix(b"tandem:{default}:") async for key in redis.scan_iter("*")}
        names = {key.decode() for key in keys if not key.startswith(b"block:")}
        expected = {"workers", "events"} | {
            f"{kind}:{name}" for kind in ("worker", "load") for name in workers
        }
        indexed = {
            f"{kind}:{name}:{epoch}" for kind in ("blocks", "sequence") for name, epoch in workers.items()
        }
        assert expected <= names <= expected | indexed
        assert any(key.startswith(b"block:") for key in keys)


async def test_bytes_sent_are_those_of_the_tokens_within_a_block(cluster, connect):
    rng = random.Random(3)
    before = await sent_bytes(cluster)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (5, 100, 257)]
    async with connect(cluster) as client:
        answers = [await client.generate(prompt, 4) for prompt in prompts]
    total = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        num_bytes = answer.last.timing.kv_bytes
        assert 0 <= num_bytes - len(prompt) * TOKEN_BYTES < BLOCK * TOKEN_BYTES
        total += num_bytes
    assert await sent_bytes(cluster) - before == total


async def sent_bytes(cluster: LocalCluster) -> float:
    async with httpx.AsyncClient(base_url=cluster.http) as client:
        text = (await client.get("/metrics")).text
    return sum(map(float, re.findall(r"^tandem_kv_sent_bytes_total\{.*\} (\S+)$", text, re.MULTILINE)))


async def test_stages_add_up_to_the_total(cluster, connect):
    async with connect(cluster) as client:
        timing = (await client.generate(list(range(200)), 24)).last.timing
    stages = ("prepare", "queue", "prefill", "grant_wait", "transfer", "decode_queue", "first_step", "decode")
    parts = [getattr(timing, f"{stage}_s") for stage in stages]
    assert all(part >= 0 for part in parts)
    assert sum(parts) == pytest.approx(timing.total_s, rel=0.05)
    assert min(timing.prefill_s, timing.first_step_s, timing.decode_s) > 0
    assert 0 < timing.time_to_first_token_s < timing.total_s


async def test_a_repeated_prompt_is_found_in_both_caches_and_gives_the_same_tokens(cluster, connect, oracle):
    prompt = [random.Random(9).randrange(256) for _ in range(6 * BLOCK)]
    async with connect(cluster) as client:
        cold = await client.generate(prompt, 12)
        await asyncio.sleep(0.5)  # the index is published in batches
        warm = await client.generate(prompt, 12)
    assert cold.token_ids == warm.token_ids == oracle(prompt, max_tokens=12)
    assert cold.usage.num_cached_tokens == 0
    assert warm.usage.num_cached_tokens == 5 * BLOCK
    assert warm.last.timing.decode_worker_id == cold.last.timing.decode_worker_id
    assert warm.last.timing.kv_bytes == 0


async def test_seeded_sampling_is_that_of_one_process(cluster, connect, oracle):
    prompt = list(range(40))
    options = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 7}
    async with connect(cluster) as client:
        answers = await asyncio.gather(*(client.generate(prompt, 24, **options) for _ in range(4)))
    assert {tuple(answer.token_ids) for answer in answers} == {
        tuple(oracle(prompt, max_tokens=24, **options))
    }
