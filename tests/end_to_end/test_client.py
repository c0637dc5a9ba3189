"""The Python client over a real tandem, with a proxy before the gateway that cuts its connections."""

import asyncio
import contextlib
import random
import signal
import sys
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio

from core.errors import Cancelled, InvalidRequest, StreamNotFound
from proto import client_pb2 as pb
from proto import client_pb2_grpc
from tandem.client import AsyncClient, Chunk, Client, Sampling
from tandem.testing import LocalCluster
from tests.chaos.proxy import PROXY_HOST, Proxy
from tests.end_to_end.clients import assert_well, make_request

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = [random.Random(6).randrange(256) for _ in range(40)]
LIMIT_S = 30.0
LONG = 1200


def greedy(max_tokens: int) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(start_cluster) -> AsyncIterator[LocalCluster]:
    async with start_cluster() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def proxy(cluster) -> AsyncIterator[Proxy]:
    made = Proxy()
    await made.start(int(cluster.grpc.rpartition(":")[2]))
    yield made
    await made.close()


def address_of(cluster: LocalCluster) -> str:
    """The gateway's gRPC, through the proxy."""
    return f"{PROXY_HOST}:{cluster.grpc.rpartition(':')[2]}"


def token_ids(chunks: list[Chunk]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


async def read_to_its_end(call: grpc.aio.UnaryStreamCall) -> None:
    """How a call ended is told once its last message is read. Raises AioRpcError."""
    while await call.read() is not grpc.aio.EOF:
        pass


async def cut_again_and_again(proxy: Proxy, pauses_s: list[float]) -> None:
    for pause_s in pauses_s:
        await asyncio.sleep(pause_s)
        proxy.cut()
        await asyncio.sleep(0.1)
        proxy.heal()


async def test_no_token_is_lost_or_repeated_when_connections_break(cluster, proxy, oracle):
    async with AsyncClient(address_of(cluster)) as client:
        chunks: list[Chunk] = []
        cuts = [1, 300, 600, 900]  # tokens: on a busy machine a chunk holds many
        async for chunk in client.stream(PROMPT, greedy(LONG)):
            chunks.append(chunk)
            if cuts and len(token_ids(chunks)) >= cuts[0]:
                cuts.pop(0)
                proxy.cut()
                proxy.heal()
    assert token_ids(chunks) == oracle(PROMPT, max_tokens=LONG)
    assert chunks[-1].timing.num_attempts == 1
    assert proxy.num_connections > 1
    await assert_well(cluster, oracle)


async def test_streams_of_a_client_that_blocks_go_on_as_well(cluster, proxy, oracle):
    def ask() -> list[int]:
        with Client(address_of(cluster)) as client:
            return list(client.generate(PROMPT, greedy(LONG), deadline_s=LIMIT_S).token_ids)

    cuts = asyncio.create_task(cut_again_and_again(proxy, [0.3, 0.2, 0.2]))
    answers = await asyncio.gather(*(asyncio.to_thread(ask) for _ in range(3)))
    await cuts
    assert answers == [oracle(PROMPT, max_tokens=LONG)] * 3
    assert proxy.num_connections > 3
    await assert_well(cluster, oracle)


async def test_a_client_that_leaves_leaves_nothing_behind(cluster, oracle):
    async with AsyncClient(cluster.grpc) as client:
        async with contextlib.aclosing(client.stream(PROMPT, greedy(LONG))) as stream:
            await anext(stream)
        await cluster.wait_idle(5.0)
        await assert_well(cluster, oracle)


async def test_a_stream_has_one_reader_and_whoever_has_its_token_may_be_the_next(cluster, oracle):
    expected = oracle(PROMPT, max_tokens=LONG)
    async with grpc.aio.insecure_channel(cluster.grpc) as channel:
        stub = client_pb2_grpc.TandemStub(channel)
        request = make_request(PROMPT, LONG, ignore_eos=True, resumable=True)
        first = stub.GenerateStream(request)
        opening = await first.read()
        assert opening.resume_token and not opening.HasField("choice")
        decode = cluster.processes["decode-0"]
        decode.signal_all(signal.SIGSTOP)  # the first stream cannot end before the second begins
        try:
            second = stub.ResumeStream(pb.ResumeStreamRequest(resume_token=opening.resume_token, offset=1))
            with pytest.raises(grpc.aio.AioRpcError) as superseded:
                await read_to_its_end(first)
        finally:
            decode.signal_all(signal.SIGCONT)
        received = [token_id async for chunk in second for token_id in chunk.choice.token_ids]
        assert received == expected
        assert superseded.value.code() is grpc.StatusCode.CANCELLED
        assert ("tandem-code", Cancelled.code.value) in map(tuple, superseded.value.trailing_metadata())


@pytest.mark.parametrize(
    ("token", "offset", "code", "told"),
    [
        ("", 0, grpc.StatusCode.NOT_FOUND, StreamNotFound),
        ("x" * 100_000, 0, grpc.StatusCode.NOT_FOUND, StreamNotFound),
        (None, 2**32 - 1, grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
    ],
)
async def test_what_is_not_there_cannot_be_resumed(cluster, token, offset, code, told):
    async with grpc.aio.insecure_channel(cluster.grpc) as channel:
        stub = client_pb2_grpc.TandemStub(channel)
        chunks = [chunk async for chunk in stub.GenerateStream(make_request(PROMPT, 2, resumable=True))]
        token = chunks[0].resume_token if token is None else token
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ResumeStream(pb.ResumeStreamRequest(resume_token=token, offset=offset)).read()
        assert caught.value.code() is code
        assert ("tandem-code", told.code.value) in map(tuple, caught.value.trailing_metadata())


async def test_model_is_that_of_the_tandem(cluster):
    async with AsyncClient(cluster.grpc) as client:
        model = await client.model()
    assert (model.model, model.context_len) == ("test", 2048)


async def test_the_terminal_s_complete_prints_the_answer_and_its_stages(cluster):
    command = [sys.executable, "-m", "tandem.cli", "complete", "hello", "--max-tokens", "4"]
    process = await asyncio.create_subprocess_exec(
        *command, "--grpc", cluster.grpc, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(LIMIT_S):
        _, stages = await process.communicate()
    assert process.returncode == 0
    assert "prefill-0 -> decode-0" in stages.decode()
    assert "4 generated" in stages.decode()
