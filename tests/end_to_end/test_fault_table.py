"""The rows of the fault table that need more than a retry: each with real processes, real tokens, and blocks that
come back."""

import asyncio
import json
import random
import signal
from pathlib import Path

import grpc
import httpx
import pytest
from redis.asyncio import Redis
from safetensors.torch import load_file, save_file

from cluster.session import SILENCE_S
from core.worker import Role
from engine.testing import make_tiny_model
from tandem.testing import LocalCluster

rng = random.Random(8)
PROMPTS = [[rng.randrange(256) for _ in range(60)] for _ in range(6)]


async def start_streams(client, prompts, num_tokens, pause_s=0.5):
    streams = [
        asyncio.create_task(client.generate(prompt, num_tokens, ignore_eos=True)) for prompt in prompts
    ]
    await asyncio.sleep(pause_s)
    return streams


async def epoch_of(cluster, name):
    return next(w["record"]["epoch"] for w in await cluster.workers() if w["record"]["worker_id"] == name)


async def metric(cluster, name):
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"{cluster.http}/metrics")).text
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))


async def pause_beyond_the_lease(cluster, name, meanwhile):
    """Stop a worker for longer than its sessions may be silent; what `meanwhile` gave. It comes back as another
    incarnation, with its sessions open."""
    names = {w["record"]["worker_id"] for w in await cluster.workers()}
    epoch = await epoch_of(cluster, name)
    process = cluster.processes[name]
    process.signal_all(signal.SIGSTOP)
    results, _ = await asyncio.gather(meanwhile, asyncio.sleep(SILENCE_S + 1))
    process.signal_all(signal.SIGCONT)
    async with asyncio.timeout(10):
        while name not in {w["record"]["worker_id"] for w in await cluster.workers()} or (
            await epoch_of(cluster, name) == epoch
        ):
            await asyncio.sleep(0.05)
    await cluster.wait_workers(sorted(names))
    assert "fenced" in process.tail(20_000)
    return results


async def test_gateway_dies_its_handoffs_are_aborted_on_both_tiers_and_another_takes_over(
    start_cluster, connect, oracle
):
    async with start_cluster() as cluster:
        async with connect(cluster) as client:
            streams = await start_streams(client, PROMPTS, 1500)
            await cluster.processes["gateway"].kill()
            results = await asyncio.gather(*streams, return_exceptions=True)
        assert all(isinstance(result, grpc.aio.AioRpcError) for result in results)
        await cluster.start_gateway()
        await cluster.wait_idle(timeout_s=5)
        async with connect(cluster) as client:
            assert (await client.generate(PROMPTS[0], 8, ignore_eos=True)).token_ids == oracle(
                PROMPTS[0], max_tokens=8
            )


async def test_decode_worker_paused_beyond_its_lease_is_replaced_and_its_late_tokens_are_dropped(
    start_cluster, connect, oracle
):
    async with (
        start_cluster(num_decode=2, worker_arguments=("--num-blocks", "700")) as cluster,
        connect(cluster) as client,
    ):
        await cluster.wait_workers(["prefill-0", "decode-0", "decode-1"])
        streams = await start_streams(client, PROMPTS, 800)
        answers = await pause_beyond_the_lease(cluster, "decode-0", asyncio.gather(*streams))
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer.token_ids == oracle(prompt, max_tokens=800)
        assert any("worker_lost" in answer.last.timing.causes for answer in answers)
        await cluster.wait_idle()
        await cluster.processes["decode-1"].kill()
        await cluster.wait_workers(["prefill-0", "decode-0"])
        again = await asyncio.gather(*(client.generate(prompt, 8, ignore_eos=True) for prompt in PROMPTS))
        assert {answer.last.timing.decode_worker_id for answer in again} == {"decode-0"}
        assert {answer.last.timing.num_attempts for answer in again} == {1}
        assert [answer.token_ids for answer in again] == [oracle(prompt, max_tokens=8) for prompt in PROMPTS]


async def test_prefill_worker_paused_beyond_its_lease_costs_a_retry_only(start_cluster, connect, oracle):
    async with start_cluster(num_prefill=2) as cluster, connect(cluster) as client:
        await cluster.wait_workers(["prefill-0", "prefill-1", "decode-0"])
        prompts = [prompt * 20 for prompt in PROMPTS]
        streams = await start_streams(client, prompts, 4, pause_s=0.1)
        answers = await pause_beyond_the_lease(cluster, "prefill-0", asyncio.gather(*streams))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == oracle(prompt, max_tokens=4)
        await cluster.wait_idle()
        await cluster.processes["prefill-1"].kill()
        await cluster.wait_workers(["prefill-0", "decode-0"])
        unseen = [prompt[::-1] for prompt in PROMPTS]  # of those seen before decode has more than prefill-0
        again = await asyncio.gather(*(client.generate(prompt, 8, ignore_eos=True) for prompt in unseen))
        assert {answer.last.timing.prefill_worker_id for answer in again} == {"prefill-0"}
        assert {answer.last.timing.num_attempts for answer in again} == {1}


async def test_decode_worker_dies_before_the_seal_and_the_leased_blocks_go_to_another(
    start_cluster, connect, oracle
):
    slow = {"TANDEM_FAULTS": json.dumps({"delay_s": 0.4})}
    async with start_cluster(num_decode=2, environment=slow) as cluster, connect(cluster) as client:
        await cluster.wait_workers(["prefill-0", "decode-0", "decode-1"])
        prompts = [[index, *PROMPTS[0] * 4][:200] for index in range(4)]
        streams = await start_streams(client, prompts, 6, pause_s=0.6)
        await cluster.processes["decode-0"].kill()
        answers = await asyncio.gather(*streams)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == oracle(prompt, max_tokens=6)
        num_retried = sum(answer.last.timing.num_attempts > 1 for answer in answers)
        assert num_retried > 0
        assert await metric(cluster, "tandem_resends_total") == num_retried
        await cluster.wait_idle()


async def test_out_of_blocks_while_decoding_is_slower_and_right(start_cluster, connect, oracle):
    async with start_cluster(worker_arguments=("--num-blocks", "40")) as cluster, connect(cluster) as client:
        answers = await asyncio.gather(*(client.generate(prompt, 300, ignore_eos=True) for prompt in PROMPTS))
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer.token_ids == oracle(prompt, max_tokens=300)
        num_preemptions = sum(answer.last.timing.num_preemptions for answer in answers)
        assert num_preemptions > 0
        assert await metric(cluster, "tandem_preemptions_total") == num_preemptions
        await cluster.wait_idle()


async def test_logits_that_are_not_finite_fail_that_request_and_no_other(tmp_path: Path, connect):
    model = make_tiny_model(tmp_path / "tiny")
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][77] = float("nan")
    weights["model.embed_tokens.weight"][78:] = 0.5
    untied = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].nan_to_num(0.1).contiguous()}
    save_file(untied, model / "model.safetensors", metadata={"format": "pt"})
    config = (
        (model / "config.json")
        .read_text()
        .replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    )
    (model / "config.json").write_text(config)
    arguments = ("--dtype", "float32", "--num-blocks", "128")
    async with LocalCluster(model, worker_arguments=arguments) as cluster, connect(cluster) as client:
        good = [[1, 2, 3, index] for index in range(5)]
        alone = [(await client.generate(prompt, 20, ignore_eos=True)).token_ids for prompt in good]
        results = await asyncio.gather(
            *(client.generate(prompt, 20, ignore_eos=True) for prompt in good),
            *(client.generate([1, 2, 77, index], 20, ignore_eos=True) for index in range(5)),
            return_exceptions=True,
        )
        assert [result.token_ids for result in results[:5]] == alone
        for error in results[5:]:
            assert isinstance(error, grpc.aio.AioRpcError)
            assert error.code() is grpc.StatusCode.INTERNAL
            assert "finite" in error.details()
        await cluster.wait_idle()


async def test_redis_flushed_under_load_is_filled_again(start_cluster, connect, oracle):
    async with (
        start_cluster() as cluster,
        connect(cluster) as client,
        Redis.from_url(cluster.redis_url) as redis,
    ):
        streams = await start_streams(client, PROMPTS, 300)
        await redis.flushall()
        answers = await asyncio.gather(*streams)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer.token_ids == oracle(prompt, max_tokens=300)
        async with asyncio.timeout(10):
            while not {b"prefill-0", b"decode-0"} <= await redis.smembers("tandem:{default}:workers"):
                await asyncio.sleep(0.05)
            while not [key async for key in redis.scan_iter("tandem:{default}:block:*")]:
                await asyncio.sleep(0.05)


async def test_a_worker_that_starts_while_redis_is_away_is_found_when_it_returns(
    start_cluster, connect, oracle
):
    async with start_cluster() as cluster, connect(cluster) as client:
        await cluster.stop_valkey()
        await cluster.add_worker(Role.DECODE, "decode-1")
        await asyncio.sleep(3)
        assert (await client.generate(PROMPTS[1], 8, ignore_eos=True)).token_ids == oracle(
            PROMPTS[1], max_tokens=8
        )
        await cluster.start_valkey()
        await cluster.wait_workers(["prefill-0", "decode-0", "decode-1"], timeout_s=20)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_a_killed_engine_process_ends_its_worker_not_the_cluster(start_cluster, connect, oracle, name):
    import psutil

    async with start_cluster(num_prefill=2, num_decode=2) as cluster, connect(cluster) as client:
        await cluster.wait_workers(["prefill-0", "prefill-1", "decode-0", "decode-1"])
        streams = await start_streams(client, PROMPTS, 300, pause_s=0.2)
        psutil.Process(cluster.processes[name].process.pid).children()[0].kill()
        answers = await asyncio.gather(*streams)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer.token_ids == oracle(prompt, max_tokens=300)
        assert await asyncio.wait_for(cluster.processes[name].process.wait(), 30) == 1
        await cluster.wait_idle()
