"""Workers that the test speaks for, and a fleet that is connected to them through the sessions' seam."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from cluster.handoff_rows import HandoffRows
from cluster.registry import Registry
from cluster.store import Store
from core.clock import VirtualClock
from core.ids import Epoch, WorkerId
from core.kv_spec import DType, KVSpec
from core.worker import Role, WorkerRecord
from gateway.routing.fleet import Fleet
from gateway.routing.prefix_index import PrefixIndex
from proto import convert
from proto import session_pb2 as pb

SPEC = KVSpec(2, 2, 16, 16, DType.FLOAT32, "m")
LIMIT_S = 5.0


class Worker:
    """The test's end of one worker's sessions."""

    def __init__(self, name: str, role: Role) -> None:
        epoch = Epoch(sum(name.encode()))
        self.record = WorkerRecord(WorkerId(name), epoch, role, "host:1", "m", SPEC, 512, 300, 64, 8)
        self.commands: asyncio.Queue[Any] = asyncio.Queue()
        self.event, self.wrap = (
            (pb.PrefillEvent, pb.PrefillEvents) if role is Role.PREFILL else (pb.DecodeEvent, pb.DecodeEvents)
        )
        self._messages: asyncio.Queue[Any] = asyncio.Queue()

    async def session(self, commands: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        reading = asyncio.create_task(self._read(commands))
        try:
            yield self.wrap(events=[self.event(hello=convert.hello_to_proto(self.record))])
            while (message := await self._messages.get()) is not None:
                yield message
        finally:
            reading.cancel()

    async def _read(self, commands: AsyncIterator[Any]) -> None:
        async for batch in commands:
            for command in batch.commands:
                if command.WhichOneof("command") != "hello":
                    self.commands.put_nowait(command)

    async def take(self, kind: str) -> Any:
        async with asyncio.timeout(LIMIT_S):
            command = await self.commands.get()
        assert command.WhichOneof("command") == kind, command
        return getattr(command, kind)

    def emit(self, **event: Any) -> None:
        self._messages.put_nowait(self.wrap(events=[self.event(**event)]))

    def hang_up(self) -> None:
        self._messages.put_nowait(None)


class Rig:
    """Two workers of each tier, known to a fleet without a registry: it serves on its last view."""

    def __init__(self) -> None:
        self.prefill = [Worker(f"p{index}", Role.PREFILL) for index in range(2)]
        self.decode = [Worker(f"d{index}", Role.DECODE) for index in range(2)]
        self.workers = [*self.prefill, *self.decode]
        store = Store("redis://127.0.0.1:1")
        self.rows = HandoffRows(store)
        self.prefixes = PrefixIndex(store)
        self.fleet = Fleet(Registry(store), "m", self.prefixes, self._open)
        self.clock = VirtualClock()

    def _open(self, record: WorkerRecord, commands: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        return next(worker for worker in self.workers if worker.record == record).session(commands)

    async def connect(self) -> None:
        self.fleet._follow([worker.record for worker in self.workers])
        await asyncio.gather(*(link.up.wait() for link in self.fleet.links))

    def assert_clean(self) -> None:
        for link in self.fleet.links:
            row = link.row
            counted = (link.num_open, row.num_pending, row.num_pending_tokens, row.num_pending_whole)
            assert counted == (0, 0, 0, 0), link.record.worker_id
        assert not self.rows._live

    async def close(self) -> None:
        for task in self.fleet._tasks:
            task.cancel()
        await asyncio.gather(*self.fleet._tasks, return_exceptions=True)
