"""What end-to-end tests ask a cluster with, and what must hold of it after whatever befell it."""

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import grpc
import httpx

from proto import client_pb2 as pb
from proto import client_pb2_grpc
from tandem.testing import LocalCluster

LAST_PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8]


@dataclass(frozen=True)
class Answer:
    """A whole stream of one choice: its tokens, text, what its last chunk says of it, and usage."""

    token_ids: list[int]
    text: str
    last: pb.Choice
    usage: pb.Usage


def make_request(prompt_ids: Sequence[int], max_tokens: int = 16, **options: object) -> pb.GenerateRequest:
    ids = pb.TokenIds(ids=prompt_ids)
    return pb.GenerateRequest(token_ids=ids, max_tokens=max_tokens, **{"temperature": 0.0, **options})


class Client:
    """The gRPC API as the tests use it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = client_pb2_grpc.TandemStub(channel)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int = 16,
        deadline_s: float | None = None,
        **options: object,
    ) -> Answer:
        """Greedy unless told otherwise. Raises AioRpcError."""
        token_ids: list[int] = []
        text, last = "", pb.GenerateChunk()
        request = make_request(prompt_ids, max_tokens, **options)
        async for last in self.stub.GenerateStream(request, timeout=deadline_s):
            token_ids += last.choice.token_ids
            text += last.choice.text
        return Answer(token_ids, text, last.choice, last.usage)


class Load:
    """Requests asked for at a steady rate while something else goes on: `async with Load(...) as load`. Leaving the
    block waits for those that run."""

    def __init__(
        self, client: Client, make_prompt: Callable[[int], list[int]], max_tokens: int, pause_s: float
    ) -> None:
        self.prompts: list[list[int]] = []
        self.results: list[Answer | BaseException] = []
        self.max_tokens = max_tokens
        self._client = client
        self._make_prompt = make_prompt
        self._pause_s = pause_s
        self._running: list[asyncio.Task[Answer]] = []

    async def __aenter__(self) -> Self:
        self._asking = asyncio.create_task(self._ask())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._asking.cancel()
        await asyncio.wait([self._asking])
        self.results = await asyncio.gather(*self._running, return_exceptions=True)

    async def _ask(self) -> None:
        while True:
            prompt = self._make_prompt(len(self.prompts))
            self.prompts.append(prompt)
            work = self._client.generate(prompt, self.max_tokens, ignore_eos=True)
            self._running.append(asyncio.create_task(work))
            await asyncio.sleep(self._pause_s)

    def assert_right(self, oracle: Callable[..., list[int]]) -> None:
        """Every request had an answer, and the right one."""
        assert self.results
        for prompt, result in zip(self.prompts, self.results, strict=True):
            assert isinstance(result, Answer), result
            assert result.token_ids == oracle(prompt, max_tokens=self.max_tokens), prompt


async def assert_well(
    cluster: LocalCluster, oracle: Callable[..., list[int]], idle_within_s: float = 10.0
) -> None:
    """The cluster is alive, answers rightly, and holds no block, place or request of anybody."""
    async with (
        httpx.AsyncClient(base_url=cluster.http) as http,
        grpc.aio.insecure_channel(cluster.grpc) as channel,
    ):
        assert (await http.get("/health")).status_code == 200
        answer = await Client(channel).generate(LAST_PROMPT, 8, ignore_eos=True)
        assert answer.token_ids == oracle(LAST_PROMPT, max_tokens=8)
        await cluster.wait_idle(idle_within_s)
        assert (await http.get("/cluster")).json()["requests"] == []


async def read_counter(cluster: LocalCluster, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    async with httpx.AsyncClient(base_url=cluster.http) as http:
        text = (await http.get("/metrics")).text
    samples = re.findall(rf"^{name}(\{{.*\}})? (\S+)$", text, re.MULTILINE)
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(float(value) for found, value in samples if all(label in found for label in wanted))


async def indexed(cluster: LocalCluster) -> float:
    """Blocks that the gateway knows."""
    return await read_counter(cluster, "tandem_prefix_index_blocks")


async def wait_indexed(cluster: LocalCluster, num_more: int, before: float) -> None:
    """Until it knows so many more than before."""
    async with asyncio.timeout(10):
        while await indexed(cluster) < before + num_more:
            await asyncio.sleep(0.02)
