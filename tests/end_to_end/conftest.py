"""Clusters of real processes over the tiny model."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from tandem.testing import LocalCluster
from tests.end_to_end.clients import Client

WORKER = ("--dtype", "float32", "--num-blocks", "256", "--token-budget", "128", "--max-batch", "16")
StartCluster = Callable[..., AbstractAsyncContextManager[LocalCluster]]


@pytest.fixture(scope="session")
def start_cluster(tiny_model: Path) -> StartCluster:
    """`async with start_cluster(num_prefill=2, ...) as cluster`."""

    @asynccontextmanager
    async def start(**options: object) -> AsyncIterator[LocalCluster]:
        model = options.pop("model", tiny_model)
        arguments = (*WORKER, *options.pop("worker_arguments", ()))  # type: ignore[misc]
        async with LocalCluster(model, worker_arguments=arguments, **options) as cluster:  # type: ignore[arg-type]
            yield cluster

    return start


@pytest.fixture(scope="session")
def connect() -> Callable[[LocalCluster], AbstractAsyncContextManager[Client]]:
    @asynccontextmanager
    async def make(cluster: LocalCluster) -> AsyncIterator[Client]:
        async with grpc.aio.insecure_channel(cluster.grpc) as channel:
            yield Client(channel)

    return make
