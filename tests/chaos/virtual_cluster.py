"""A whole cluster in one process under virtual time: the real orchestrator, sessions, services, tiers, schedulers,
block pools and connectors. Only the wire (in memory, with delays), the engine's process (a task) and the model are
replaced.

The model is a hash (`engine.hash_runner`): a step that reads a block with wrong content fails, and no harm done from
outside explains that.
"""

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from core.block_hash import hash_chain
from core.errors import WorkerLost
from core.grant import GrantSigner
from core.ids import BlockHash, Epoch, HandoffId, WorkerId
from core.kv_region import KVRegion
from core.kv_spec import DType, KVSpec
from core.sampling import SamplingParams
from core.worker import Role, WorkerRecord
from decode_service.scheduler import DecodeTier
from decode_service.service import DecodeService
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.hash_runner import VOCAB_SIZE, HashRunner, expected_outputs
from engine.messages import AnyCommand, Report
from engine.scheduler import Scheduler, SchedulerLimits, Work
from engine.worker_loop import report, step_or_fail
from gateway.generation import GenerationRequest
from gateway.metrics import GatewayMetrics
from gateway.routing.fleet import Fleet
from gateway.routing.orchestrator import Generation, Orchestrator
from gateway.routing.prefix_mirror import Expectation, PrefixMirror
from kv_transfer.base import Identity, TransferOptions
from kv_transfer.connectors import create_receivers
from kv_transfer.faults import Faults, create_faulty_senders
from kv_transfer.granting import Granter
from kv_transfer.loopback import LoopbackNetwork
from prefill_service.scheduler import PrefillTier
from prefill_service.service import PrefillService
from proto import convert

VOCAB = VOCAB_SIZE
CONTEXT_LEN = 512
SPEC = KVSpec(1, 1, 2, 16, DType.FLOAT16, "virtual")  # 8 bytes a token: the hash of all tokens up to it
_OPTIONS = TransferOptions()


def expected_tokens(prompt_ids: Sequence[int], params: SamplingParams) -> list[int]:
    """What one process would answer."""
    return expected_outputs(prompt_ids, params, CONTEXT_LEN)


class VirtualEngine:
    """Where EngineProcess stands: the tier's loop as a task. Takes commands, steps, reports."""

    def __init__(self, tier: Any, step_s: float) -> None:
        self.tier = tier
        self.step_s = step_s
        self.running = asyncio.Event()
        self.running.set()
        self.num_steps = 0
        self._commands: list[AnyCommand] = []
        self._wake = asyncio.Event()
        self._reports: asyncio.Queue[Report | None] = asyncio.Queue()
        tier.engine.on_scheduled = self._announce
        self._task = asyncio.create_task(self._run())

    def send(self, *commands: AnyCommand) -> None:
        self._commands += commands
        self._wake.set()

    async def reports(self) -> AsyncIterator[Report]:
        while (item := await self._reports.get()) is not None:
            yield item

    async def stop(self) -> None:
        self._task.cancel()
        self._reports.put_nowait(None)
        await asyncio.wait([self._task])

    def _announce(self, work: list[Work]) -> None:
        self.tier.announce(work)
        self._reports.put_nowait(report(self.tier))

    async def _run(self) -> None:
        while True:
            commands, self._commands = self._commands, []
            for command in commands:
                self.tier.handle(command)
            did_work = step_or_fail(self.tier)
            self.num_steps += did_work
            self.tier.engine.scheduler.pool.check()
            if commands or did_work or self.tier.events:
                self._reports.put_nowait(report(self.tier))
            await self._pause(did_work)
            await self.running.wait()

    async def _pause(self, did_work: bool) -> None:
        if did_work:
            await asyncio.sleep(self.step_s)
            return
        try:
            async with asyncio.timeout(1.0):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()


class Prefixes:
    """The gateway's index, told by workers without Redis between them."""

    def __init__(self) -> None:
        self.mirror = PrefixMirror()

    def follow(self, record: WorkerRecord) -> None:
        self.mirror.add(record.epoch)

    async def leave(self, record: WorkerRecord) -> None:
        for _ in self.mirror.remove(record.epoch) or ():
            pass

    async def overlap(self, chain: Sequence[BlockHash], block_size: int) -> dict[Epoch, int]:
        return self.mirror.longest_prefix(chain)

    def expect(self, record: WorkerRecord, chain: Sequence[BlockHash]) -> Expectation:
        return self.mirror.expect(record.epoch, chain)

    def settle(self, expectation: Expectation) -> None:
        self.mirror.end(expectation)

    def observe(self, *_: object) -> None:
        pass


class Publisher:
    def __init__(self, mirror: PrefixMirror, epoch: Epoch) -> None:
        self._mirror = mirror
        self._epoch = epoch

    def note(self, is_stored: bool, block_hash: BlockHash) -> None:
        (self._mirror.store if is_stored else self._mirror.discard)(self._epoch, [block_hash])


@dataclass
class VirtualWorker:
    """One incarnation of one worker and everything of it that a crash takes along."""

    record: WorkerRecord
    region: KVRegion
    memory: memoryview
    engine: VirtualEngine
    service: Any
    connector: Any
    tasks: list[asyncio.Task[None]]
    delay_s: float = 0.001
    is_alive: bool = True
    sessions: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def pool(self) -> BlockPool:
        return self.engine.tier.engine.scheduler.pool

    @property
    def is_idle(self) -> bool:
        counts = self.pool.counts
        scheduler = self.engine.tier.engine.scheduler
        has_sequences = scheduler.running or scheduler.waiting or scheduler.num_reserved_places
        is_whole = counts["free"] + counts["cached"] == self.pool.num_blocks
        return is_whole and not has_sequences and not self.service.num_handoffs


class VirtualCluster:
    """`async with` it on a virtual loop; then ask `orchestrator`, and do harm."""

    def __init__(
        self,
        seed: int,
        num_prefill: int = 2,
        num_decode: int = 2,
        num_blocks: int = 40,
        faults: Mapping[str, Faults] | None = None,
    ) -> None:
        """`faults` befall the transfers of the prefill workers of these names."""
        self.random = random.Random(seed)
        self.workers: dict[str, VirtualWorker] = {}
        self.faults = dict(faults or {})
        self.num_messages = 0
        self._num_blocks = num_blocks
        self._counts = {Role.PREFILL: num_prefill, Role.DECODE: num_decode}
        self.prefixes = Prefixes()
        self._network = LoopbackNetwork()
        self._background: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "VirtualCluster":
        for role, count in self._counts.items():
            for index in range(count):
                await self.start_worker(role, f"{role.value}-{index}")
        self.fleet = Fleet(_Registry(self), "virtual", self.prefixes, self._open_session)  # type: ignore[arg-type]
        self.orchestrator = Orchestrator(self.fleet, self.prefixes, self, GatewayMetrics(list))  # type: ignore[arg-type]
        self._background.append(asyncio.create_task(self.fleet.run()))
        await self.fleet.wait_ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        for name in list(self.workers):
            await self.crash(name)

    @property
    def num_steps(self) -> int:
        """Engine steps and session messages so far: what the property tests count."""
        return self.num_messages + sum(worker.engine.num_steps for worker in self.workers.values())

    async def start_worker(self, role: Role, name: str) -> None:
        """A new incarnation of `name`."""
        region = KVRegion.create(SPEC.block_bytes, self._num_blocks)
        memory = memoryview(region.memory).cast("Q")
        runner = HashRunner(self._num_blocks, SPEC.block_size, memory)
        limits = SchedulerLimits(SPEC.block_size, 64, 8, CONTEXT_LEN)
        loop = asyncio.get_running_loop()
        engine = Engine(Scheduler(limits, BlockPool(self._num_blocks), loop.time), runner)
        epoch = Epoch(self.random.getrandbits(62) | 1)
        record = WorkerRecord(
            WorkerId(name),
            epoch,
            role,
            name,
            "virtual",
            SPEC,
            CONTEXT_LEN,
            VOCAB,
            self._num_blocks,
            8,
            "loopback",
        )
        identity = Identity(record.worker_id, epoch, SPEC)
        make = self._make_prefill if role is Role.PREFILL else self._make_decode
        virtual, service, connector = await make(engine, record, identity, region)
        tasks = [asyncio.create_task(service.follow_engine())]
        self.workers[name] = VirtualWorker(record, region, memory, virtual, service, connector, tasks)

    async def crash(self, name: str) -> None:
        """As SIGKILL: nothing of it says goodbye."""
        worker = self.workers.pop(name)
        worker.is_alive = False
        for task in (*worker.sessions, *worker.tasks, *worker.service._tasks):
            task.cancel()
        await worker.engine.stop()
        await worker.connector.close()
        await asyncio.gather(*worker.sessions, *worker.tasks, return_exceptions=True)
        worker.memory.release()
        with contextlib.suppress(
            BufferError
        ):  # a transfer that was cut off may still hold a view until it is collected
            worker.region.memory.close()
        os.close(worker.region.fd)

    def pause(self, name: str) -> None:
        """As SIGSTOP, for its engine and its sessions."""
        self.workers[name].engine.running.clear()

    def resume(self, name: str) -> None:
        self.workers[name].engine.running.set()

    def begin(
        self, prompt_ids: Sequence[int], choices: Sequence[SamplingParams], deadline_s: float = 120.0
    ) -> list[Generation]:
        """The choices of one prompt. Raises the typed error that refused them."""
        chain = tuple(hash_chain(prompt_ids, SPEC.fingerprint))
        leader = GenerationRequest(tuple(prompt_ids), choices[0], chain, deadline_s)
        followers = [
            GenerationRequest(tuple(prompt_ids), params, chain, deadline_s, leader=leader)
            for params in choices[1:]
        ]
        return self.orchestrator.begin([leader, *followers])

    async def take(self, generation: Generation) -> list[int]:
        """The tokens of one choice. Raises the typed error that ended it."""
        tokens = generation.tokens()
        try:
            return [token.token_id async for token in tokens]
        finally:
            await tokens.aclose()

    def _publisher(self, record: WorkerRecord) -> Publisher:
        return Publisher(self.prefixes.mirror, record.epoch)

    async def _make_prefill(
        self, engine: Engine, record: WorkerRecord, identity: Identity, region: KVRegion
    ) -> Any:
        virtual = VirtualEngine(PrefillTier(engine, SPEC.fingerprint), 0.01)
        faults = self.faults.get(record.worker_id, Faults())
        senders = create_faulty_senders(faults, "loopback", region, identity, _OPTIONS, self._network)
        hello = convert.hello_to_proto(record)
        return virtual, PrefillService(hello, identity, virtual, senders, self._publisher(record)), senders  # type: ignore[arg-type]

    async def _make_decode(
        self, engine: Engine, record: WorkerRecord, identity: Identity, region: KVRegion
    ) -> Any:
        virtual = VirtualEngine(DecodeTier(engine, SPEC.fingerprint), 0.01)
        signer = GrantSigner()
        receivers = create_receivers(["loopback"], region, identity, signer.verify, _OPTIONS, self._network)
        await receivers.start()
        granter = Granter(record.worker_id, record.epoch, signer, receivers)
        hello = convert.hello_to_proto(record)
        return virtual, DecodeService(hello, virtual, granter, self._publisher(record)), receivers  # type: ignore[arg-type]

    async def _open_session(self, record: WorkerRecord, commands: AsyncIterator[Any]) -> AsyncIterator[Any]:
        worker = self.workers.get(record.worker_id)
        if worker is None or worker.record.epoch != record.epoch:
            raise WorkerLost("connection refused")
        down: asyncio.Queue[Any] = asyncio.Queue()
        up: asyncio.Queue[Any] = asyncio.Queue()
        feeding = asyncio.create_task(self._pump(worker, commands, down))
        served = worker.service.Session(_drain(down), None)
        serving = asyncio.create_task(self._pump(worker, served, up))
        worker.sessions |= {feeding, serving}
        try:
            async for message in _drain(up):
                yield message
            raise WorkerLost("the session ended")
        finally:
            feeding.cancel()
            serving.cancel()
            worker.sessions -= {feeding, serving}
            await asyncio.gather(feeding, serving, return_exceptions=True)

    async def _pump(
        self, worker: VirtualWorker, source: AsyncIterator[Any], sink: asyncio.Queue[Any]
    ) -> None:
        """In order, each message after a delay, none while the worker is paused."""
        try:
            async for message in source:
                await worker.engine.running.wait()
                await asyncio.sleep(worker.delay_s * self.random.random())
                self.num_messages += 1
                sink.put_nowait(message)
        finally:
            sink.put_nowait(None)
            if hasattr(source, "aclose"):
                await source.aclose()

    # What the orchestrator wants of Redis: rows that nobody reads.
    def update(self, *_: object) -> None:
        pass

    def remove(self, handoff_id: HandoffId) -> None:
        pass


class _Registry:
    def __init__(self, cluster: VirtualCluster) -> None:
        self._cluster = cluster

    async def workers(self) -> list[WorkerRecord]:
        return [worker.record for worker in self._cluster.workers.values()]


async def _drain(queue: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    while (item := await queue.get()) is not None:
        yield item
