"""Clients that read slowly or not at all: they hold back themselves and nobody else."""

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing

import grpc
import httpx
import psutil
import pytest
import pytest_asyncio

from proto import client_pb2 as pb
from tandem.testing import LocalCluster
from tests.end_to_end.clients import Client, assert_well, make_request

pytestmark = pytest.mark.asyncio(loop_scope="module")
rng = random.Random(76)
BLOCK = 16
NUM_TOKENS = 1400
PROMPTS = [[rng.randrange(256) for _ in range(40)] for _ in range(2)]
SMALL_WINDOW = (
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1024),
    ("grpc.use_local_subchannel_pool", 1),
)
MAX_GROWTH_BYTES = 48 << 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(start_cluster) -> AsyncIterator[LocalCluster]:
    async with start_cluster(worker_arguments=("--num-blocks", "1300")) as running:
        yield running


class SlowStream:
    """A streamed completion over a socket whose buffers are as small as a slow line's."""

    def __init__(self, cluster: LocalCluster, prompt: list[int]) -> None:
        host, _, port = cluster.http.removeprefix("http://").partition(":")
        self._address = (host, int(port))
        self._prompt = prompt
        self._socket = socket.socket()
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)

    async def begin(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self._socket, self._address)
        options = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        body = json.dumps({"model": "test", "prompt": self._prompt, **options}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\n"
        await loop.sock_sendall(self._socket, head + b"Content-Length: %d\r\n\r\n" % len(body) + body)

    async def read_all(self, num_bytes_at_once: int = 65536) -> str:
        """What comes until the server closes: the text of its chunks, which must be whole."""
        loop = asyncio.get_running_loop()
        raw = b""
        while part := await loop.sock_recv(self._socket, num_bytes_at_once):
            raw += part
        assert raw.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        events = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: {")]
        return "".join(json.loads(event)["choices"][0]["text"] for event in events)

    def close(self) -> None:
        self._socket.close()


async def num_owned(cluster: LocalCluster) -> int:
    return sum(w["load"]["blocks_by_state"].get("owned", 0) for w in await cluster.workers())


async def wait_suspended(cluster: LocalCluster, num_streams: int) -> None:
    """Until as many streams run and none has got a token for a while."""
    seen: list[int] = []
    async with asyncio.timeout(60):
        while len(seen) < 8 or len(set(seen[-8:])) > 1:
            running = sum(w["load"]["num_running"] for w in await cluster.workers())
            seen = [*seen, await num_owned(cluster)] if running == num_streams else []
            await asyncio.sleep(0.25)


def memory_of(cluster: LocalCluster) -> dict[str, int]:
    """Bytes that each process and its children have for themselves."""
    sizes = {}
    for name, managed in cluster.processes.items():
        process = psutil.Process(managed.process.pid)
        sizes[name] = sum(p.memory_full_info().uss for p in (process, *process.children(recursive=True)))
    return sizes


async def read_on(call) -> tuple[list[int], str]:
    """The tokens and the text that are left of a stream. Raises AioRpcError."""
    token_ids: list[int] = []
    text = ""
    while (chunk := await call.read()) is not grpc.aio.EOF:
        assert isinstance(chunk, pb.GenerateChunk)
        token_ids += chunk.choice.token_ids
        text += chunk.choice.text
    return token_ids, text


@asynccontextmanager
async def stalled(cluster: LocalCluster) -> AsyncIterator[tuple[list[SlowStream], list]]:
    """Each prompt as a stream over HTTP and over gRPC that nobody reads, all suspended."""
    async with AsyncExitStack() as stack:
        over_http = [stack.enter_context(closing(SlowStream(cluster, prompt))) for prompt in PROMPTS]
        channel = grpc.aio.insecure_channel(cluster.grpc, options=SMALL_WINDOW)
        stub = Client(await stack.enter_async_context(channel)).stub
        requests = [make_request(prompt, NUM_TOKENS, ignore_eos=True) for prompt in PROMPTS]
        over_grpc = [stub.GenerateStream(request) for request in requests]
        await asyncio.gather(*(stream.begin() for stream in over_http))
        await wait_suspended(cluster, len(over_http) + len(over_grpc))
        yield over_http, over_grpc


async def test_readers_that_stall_are_held_back_alone_and_go_on_when_they_read(cluster, connect, oracle):
    await assert_well(cluster, oracle)
    before = memory_of(cluster)
    async with stalled(cluster) as (over_http, over_grpc), connect(cluster) as other:
        held = await num_owned(cluster)
        assert held < 0.8 * 2 * len(PROMPTS) * (40 + NUM_TOKENS) // BLOCK, "they were not held back"
        answer = await other.generate([9] * 50, 300, ignore_eos=True)
        assert answer.token_ids == oracle([9] * 50, max_tokens=300)
        assert await num_owned(cluster) <= held + 350 // BLOCK + 1
        grown = {name: size - before[name] for name, size in memory_of(cluster).items()}
        assert max(grown.values()) < MAX_GROWTH_BYTES, grown
        texts = await asyncio.gather(*(stream.read_all() for stream in over_http))
        answers = await asyncio.gather(*(read_on(call) for call in over_grpc))
    for prompt, text, (token_ids, same_text) in zip(PROMPTS, texts, answers, strict=True):
        assert token_ids == oracle(prompt, max_tokens=NUM_TOKENS)
        assert text == same_text
    await assert_well(cluster, oracle)


@pytest.mark.soak
async def test_readers_that_never_read_lose_their_streams_and_hold_nothing(cluster, oracle):
    async with stalled(cluster) as (over_http, over_grpc):
        await cluster.wait_idle(timeout_s=90)
        async with asyncio.timeout(30), httpx.AsyncClient(base_url=cluster.http) as http:
            while (await http.get("/cluster")).json()["requests"]:
                await asyncio.sleep(0.2)
        for call in over_grpc:
            with pytest.raises(grpc.aio.AioRpcError, match="was taken for 60 s"):
                await read_on(call)
        for stream in over_http:
            with pytest.raises(OSError):
                await stream.read_all()
    await assert_well(cluster, oracle)
