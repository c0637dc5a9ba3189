"""Clusters of real processes over the tiny model."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from proto import client_pb2 as pb
from proto import client_pb2_grpc
from tandem.testing import LocalCluster

WORKER = ("--dtype", "float32", "--num-blocks", "256", "--token-budget", "128", "--max-batch", "16")
StartCluster = Callable[..., AbstractAsyncContextManager[LocalCluster]]


@dataclass(frozen=True)
class Answer:
    """A whole stream: its tokens, text and last chunk."""

    token_ids: list[int]
    text: str
    last: pb.GenerateChunk


class Client:
    """The gRPC API as the tests use it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = client_pb2_grpc.TandemStub(channel)

    async def generate(self, prompt_ids: Sequence[int], max_tokens: int = 16, **options: object) -> Answer:
        """Greedy unless told otherwise. Raises AioRpcError."""
        token_ids: list[int] = []
        text, last = "", pb.GenerateChunk()
        async for last in self.stub.GenerateStream(make_request(prompt_ids, max_tokens, **options)):
            token_ids += last.token_ids
            text += last.text
        return Answer(token_ids, text, last)


def make_request(prompt_ids: Sequence[int], max_tokens: int = 16, **options: object) -> pb.GenerateRequest:
    ids = pb.TokenIds(ids=prompt_ids)
    return pb.GenerateRequest(token_ids=ids, max_tokens=max_tokens, **{"temperature": 0.0, **options})


@pytest.fixture(scope="session")
def start_cluster(tiny_model: Path) -> StartCluster:
    """`async with start_cluster(num_prefill=2, ...) as cluster`."""

    @asynccontextmanager
    async def start(**options: object) -> AsyncIterator[LocalCluster]:
        arguments = (*WORKER, *options.pop("worker_arguments", ()))  # type: ignore[misc]
        async with LocalCluster(tiny_model, worker_arguments=arguments, **options) as cluster:  # type: ignore[arg-type]
            yield cluster

    return start


@pytest.fixture
def connect() -> Callable[[LocalCluster], AbstractAsyncContextManager[Client]]:
    @asynccontextmanager
    async def make(cluster: LocalCluster) -> AsyncIterator[Client]:
        async with grpc.aio.insecure_channel(cluster.grpc) as channel:
            yield Client(channel)

    return make
