"""Clients that leave at random moments, by the hundred: the idle number of free blocks comes back at once."""

import asyncio
import random
from pathlib import Path

import grpc
import httpx
import pytest

from proto import client_pb2 as pb
from proto import client_pb2_grpc
from tandem.testing import LocalCluster

WORKER = ("--dtype", "float32", "--num-blocks", "256", "--token-budget", "128", "--max-batch", "16")
NUM_AT_ONCE = 20


async def leave_grpc(stub: client_pb2_grpc.TandemStub, prompt: list[int], after_s: float) -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt), max_tokens=500, temperature=0, ignore_eos=True
    )
    call = stub.GenerateStream(request)
    try:
        async with asyncio.timeout(after_s):
            async for _ in call:
                pass
    except TimeoutError:
        call.cancel()


async def leave_http(client: httpx.AsyncClient, prompt: list[int], after_s: float, is_stream: bool) -> None:
    body = {"model": "test", "prompt": prompt, "max_tokens": 500, "ignore_eos": True, "stream": is_stream}
    try:
        async with asyncio.timeout(after_s), client.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_raw():
                pass
    except TimeoutError:
        pass


async def run(model: Path, num_clients: int) -> None:
    rng = random.Random(7)
    gate = asyncio.Semaphore(NUM_AT_ONCE)
    async with (
        LocalCluster(model, worker_arguments=WORKER) as cluster,
        grpc.aio.insecure_channel(cluster.grpc) as channel,
        httpx.AsyncClient(base_url=cluster.http) as http,
    ):
        stub = client_pb2_grpc.TandemStub(channel)

        async def one() -> None:
            prompt = [rng.randrange(256) for _ in range(rng.choice((3, 40, 200)))]
            after_s = rng.random() ** 2 * 0.6
            async with gate:
                way = rng.randrange(3)
                await (
                    leave_grpc(stub, prompt, after_s)
                    if way == 0
                    else leave_http(http, prompt, after_s, way == 1)
                )

        await asyncio.gather(*(one() for _ in range(num_clients)))
        await cluster.wait_idle(timeout_s=5)
        answer = await stub.Generate(pb.GenerateRequest(text="still here", max_tokens=4))
        assert answer.usage.num_completion_tokens > 0


async def test_200_clients_that_leave(tiny_model):
    await run(tiny_model, 200)


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_2000_clients_that_leave(tiny_model):
    await run(tiny_model, 2000)
