"""What breaks on the way, and what the client sees of it: nothing, or one typed error."""

import asyncio
import json
import random

import grpc
import pytest

from core.worker import Role

PROMPT = [random.Random(5).randrange(256) for _ in range(150)]


async def test_a_corrupted_block_is_caught_by_the_seal_and_the_request_is_retried(
    start_cluster, connect, oracle
):
    faults = {"TANDEM_FAULTS": json.dumps({"corrupts": True, "every": 2})}
    async with start_cluster(environment=faults) as cluster, connect(cluster) as client:
        for _ in range(3):
            answer = await client.generate(PROMPT, 12)
            assert answer.token_ids == oracle(PROMPT, max_tokens=12)
            assert answer.last.timing.num_attempts == 2
        await cluster.wait_idle()
        assert "digest" in cluster.processes["decode-0"].tail()


async def test_a_transfer_that_never_comes_right_ends_in_a_typed_error(start_cluster, connect):
    async with start_cluster(environment={"TANDEM_FAULTS": json.dumps({"corrupts": True})}) as cluster:
        async with connect(cluster) as client:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.generate(PROMPT, 12)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert ("tandem-code", "transfer_failed") in [
            tuple(pair) for pair in caught.value.trailing_metadata()
        ]
        await cluster.wait_idle()


async def test_an_idle_prefill_worker_can_be_replaced_without_touching_anything_else(
    start_cluster, connect, oracle
):
    async with start_cluster() as cluster, connect(cluster) as client:
        await client.generate(PROMPT, 4)
        await cluster.processes["prefill-0"].kill()
        await cluster.add_worker(Role.PREFILL, "prefill-1")
        await cluster.wait_workers(["decode-0", "prefill-1"])
        answer = await client.generate(PROMPT, 8)
        assert answer.token_ids == oracle(PROMPT, max_tokens=8)
        assert answer.last.timing.prefill_worker_id == "prefill-1"
        assert list(answer.last.timing.causes) == []


async def test_without_a_prefill_worker_short_prompts_are_prefilled_on_decode_and_long_ones_refused(
    start_cluster, connect, oracle
):
    async with start_cluster(num_prefill=1) as cluster, connect(cluster) as client:
        await cluster.processes["prefill-0"].kill()
        await cluster.wait_workers(["decode-0"])
        answers = await asyncio.gather(*(client.generate([i, *PROMPT], 40) for i in range(4)))
        for index, answer in enumerate(answers):
            assert answer.token_ids == oracle([index, *PROMPT], max_tokens=40)
            assert list(answer.last.timing.causes) == ["no_prefill_worker"]
            assert answer.last.timing.prefill_worker_id == ""
            assert answer.last.timing.kv_bytes == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.generate([random.Random(2).randrange(256) for _ in range(1500)], 4)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await cluster.wait_idle()


async def test_streams_of_a_killed_decode_worker_continue_on_another(start_cluster, connect, oracle):
    async with (
        start_cluster(num_decode=2, worker_arguments=("--num-blocks", "700")) as cluster,
        connect(cluster) as client,
    ):
        await cluster.wait_workers(["prefill-0", "decode-0", "decode-1"])
        prompts = [PROMPT[start:] for start in range(0, 120, 20)]
        streams = [asyncio.create_task(client.generate(prompt, 1200)) for prompt in prompts]
        await asyncio.sleep(0.7)
        await cluster.processes["decode-0"].kill()
        answers = await asyncio.gather(*streams)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == oracle(prompt, max_tokens=1200)
        assert max(answer.last.timing.num_attempts for answer in answers) == 2
        assert any("worker_lost" in answer.last.timing.causes for answer in answers)
        await cluster.wait_idle()


async def test_streams_of_a_killed_prefill_worker_are_prefilled_on_another(start_cluster, connect, oracle):
    async with start_cluster(num_prefill=2) as cluster, connect(cluster) as client:
        await cluster.wait_workers(["prefill-0", "prefill-1", "decode-0"])
        prompts = [[index, *PROMPT * 10][:1500] for index in range(8)]
        streams = [asyncio.create_task(client.generate(prompt, 4)) for prompt in prompts]
        await asyncio.sleep(0.2)
        await cluster.processes["prefill-0"].kill()
        answers = await asyncio.gather(*streams)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == oracle(prompt, max_tokens=4)
        await cluster.wait_idle()


async def test_clients_that_leave_at_any_moment_leave_no_block_behind(start_cluster, connect, oracle):
    rng = random.Random(11)
    async with start_cluster() as cluster, connect(cluster) as client:
        for _ in range(10):
            streams = [
                asyncio.create_task(client.generate([rng.randrange(256), *PROMPT], 300)) for _ in range(6)
            ]
            await asyncio.sleep(rng.random() * 0.4)
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        await cluster.wait_idle(timeout_s=5)
        assert (await client.generate(PROMPT, 8)).token_ids == oracle(PROMPT, max_tokens=8)


async def test_sigterm_lets_streams_finish_and_every_service_exits_with_0(start_cluster, connect, oracle):
    async with start_cluster() as cluster, connect(cluster) as client:
        stream = asyncio.create_task(client.generate(PROMPT, 200))
        await asyncio.sleep(0.5)
        statuses = [await cluster.processes[name].stop() for name in ("gateway", "prefill-0", "decode-0")]
        assert statuses == [0, 0, 0], cluster.logs()
        assert (await stream).token_ids == oracle(PROMPT, max_tokens=200)


async def test_serving_goes_on_while_redis_is_gone(start_cluster, connect, oracle):
    async with start_cluster() as cluster, connect(cluster) as client:
        await cluster._valkey.stop()
        await asyncio.sleep(4)
        answer = await client.generate(PROMPT, 8)
        assert answer.token_ids == oracle(PROMPT, max_tokens=8)
        assert cluster.processes["gateway"].tail().count("Redis does not answer") == 1
