"""Workers without their tiers' own services: real gRPC, real connectors, real pools; only nothing is computed."""

import asyncio
from collections.abc import Sequence

import grpc

from core.clock import monotonic
from core.ids import BlockHash, Epoch, WorkerId
from core.kv_region import KVRegion
from core.kv_spec import DType, KVSpec
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.hash_runner import HashRunner
from engine.messages import Fetching, Lent
from engine.scheduler import Scheduler, SchedulerLimits
from kv_cache.block_service import BlockService
from kv_cache.engine_cache import EngineCache
from kv_transfer.base import Identity, TransferOptions
from kv_transfer.connections import Connections
from kv_transfer.faults import Faults
from prefill_service.scheduler import PrefillTier
from proto import blocks_pb2_grpc
from tests.engine.inline_engine import InlineEngine

SPEC = KVSpec(2, 2, 8, 16, DType.FLOAT32, "model")
NUM_BLOCKS = 16
CHAIN = [BlockHash(bytes([number]) * 16) for number in range(24)]


class Worker:
    """A worker without its tier's own service."""

    def __init__(self, name: str, faults: Faults | None = None) -> None:
        self.pool = BlockPool(NUM_BLOCKS)
        self.region = KVRegion.create(SPEC.block_bytes, NUM_BLOCKS)
        limits = SchedulerLimits(SPEC.block_size, 64, 4, 400)
        scheduler = Scheduler(limits, self.pool, monotonic)
        runner = HashRunner(NUM_BLOCKS, SPEC.block_size)
        self.engine = InlineEngine(PrefillTier(Engine(scheduler, runner), "model"))
        self.identity = Identity(WorkerId(name), Epoch(len(name)), SPEC)
        self.connections = Connections("tcp", self.region, self.identity, TransferOptions(), faults)
        self.cache = EngineCache(self.engine)
        self.service = BlockService(self.cache, self.connections)
        self.server = grpc.aio.server()
        blocks_pb2_grpc.add_BlocksServicer_to_server(self.service, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.connections.start()
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")
        self.stub = blocks_pb2_grpc.BlocksStub(self.channel)
        self._tasks = [asyncio.create_task(self.engine.run()), asyncio.create_task(self._follow())]

    async def close(self) -> None:
        await self.channel.close()
        await self.server.stop(None)
        await self.connections.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        self.region.close()

    async def _follow(self) -> None:
        async for report in self.engine.reports():
            for event in report.events:
                assert isinstance(event, Fetching | Lent)
                self.cache.on_event(event)

    def hold(self, hashes: Sequence[BlockHash]) -> None:
        """Have these cached, each block full of its hash."""
        blocks = self.pool.allocate(len(hashes))
        assert blocks is not None
        for block, block_hash in zip(blocks, hashes, strict=True):
            self.region.view(block)[:] = content(block_hash)
            self.pool.register(block, block_hash)
        self.pool.release(blocks)

    def check(self, num_held: int) -> None:
        """So many leading blocks of the chain are cached, and hold what they should."""
        found = self.pool.lookup(CHAIN)
        assert len(found) == num_held
        for block, block_hash in zip(found, CHAIN, strict=False):
            assert bytes(self.region.view(block)) == content(block_hash)

    async def wait_idle(self) -> None:
        async with asyncio.timeout(10):
            while self.pool.num_available < NUM_BLOCKS:
                await asyncio.sleep(0.01)
        self.pool.check()


def content(block_hash: BlockHash) -> bytes:
    return block_hash * (SPEC.block_bytes // len(block_hash))
