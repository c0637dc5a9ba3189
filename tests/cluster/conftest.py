"""A real Valkey for each test, and what its tests pause, flush and restart."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any

import pytest
import pytest_asyncio

from cluster.store import Store
from cluster.valkey import EmbeddedValkey
from core.ids import Epoch, WorkerId
from core.kv_spec import DType, KVSpec
from core.worker import Role, WorkerRecord

SPEC = KVSpec(2, 2, 16, 16, DType.FLOAT32, "tests")
LIMIT_S = 20.0


class Redis:
    """The server, and the stores that a test opened on it."""

    def __init__(self, server: EmbeddedValkey) -> None:
        self.server = server
        self.stores: list[Store] = []

    def store(self) -> Store:
        self.stores.append(Store(self.server.url, "tests"))
        return self.stores[-1]

    def pause(self) -> None:
        os.kill(self.server.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.server.pid, signal.SIGCONT)

    async def restart(self) -> None:
        """On the same port, empty."""
        await self.server.stop()
        self.server = await EmbeddedValkey.start(self.server.port)


@pytest_asyncio.fixture
async def redis() -> AsyncIterator[Redis]:
    running = Redis(await EmbeddedValkey.start())
    yield running
    for store in running.stores:
        await store.close()
    await running.server.stop()


@pytest_asyncio.fixture
async def background() -> AsyncIterator[Callable[[Awaitable[None]], asyncio.Task[None]]]:
    """Starts a task that is cancelled at the end; an error of its own fails the test."""
    tasks: list[asyncio.Task[None]] = []

    def start(work: Awaitable[None]) -> asyncio.Task[None]:
        tasks.append(asyncio.ensure_future(work))
        return tasks[-1]

    yield start
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(result, asyncio.CancelledError | None):
            raise result


def record_of(name: str, epoch: int = 1, role: Role = Role.DECODE) -> WorkerRecord:
    return WorkerRecord(WorkerId(name), Epoch(epoch), role, "127.0.0.1:1", "m", SPEC, 512, 300, 64, 8)


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    """Until it holds; the bound is only there so that a broken test ends."""
    async with asyncio.timeout(LIMIT_S):
        while not await holds():
            await asyncio.sleep(0.01)


record_of_fixture = pytest.fixture(name="record_of")(lambda: record_of)
eventually_fixture = pytest.fixture(name="eventually")(lambda: eventually)


@pytest.fixture
def redis_loop() -> Iterator[tuple[Redis, Callable[[Coroutine[Any, Any, Any]], Any]]]:
    """For property tests, which are not coroutines: a server on a loop of its own, and that loop's run()."""
    with asyncio.Runner() as runner:
        running = Redis(runner.run(EmbeddedValkey.start()))
        yield running, runner.run
        for store in running.stores:
            runner.run(store.close())
        runner.run(running.server.stop())
