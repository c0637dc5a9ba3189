"""The prefill tier's service between a gateway's session, the real tier and a real receiver (over loopback). The
engine's process is a task here; what it computes is hashes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from cluster.block_index import BlockPublisher
from cluster.store import Store
from core.clock import monotonic
from core.errors import ErrorCode
from core.grant import Grant, GrantSigner
from core.ids import BlockId, Epoch, HandoffId, RequestId, WorkerId
from core.kv_region import KVRegion
from core.kv_spec import DType, KVSpec
from core.sampling import SamplingParams
from core.worker import Role, WorkerRecord
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.hash_runner import HashRunner
from engine.scheduler import Scheduler, SchedulerLimits
from kv_transfer.base import Identity, TransferOptions
from kv_transfer.connectors import ReceiverSet, create_receivers, create_senders
from kv_transfer.loopback import LoopbackNetwork
from prefill_service.scheduler import PrefillTier
from prefill_service.service import PrefillService
from proto import convert
from proto import session_pb2 as pb
from tests.engine.inline_engine import InlineEngine

SPEC = KVSpec(1, 1, 2, 16, DType.FLOAT16, "model")
NUM_BLOCKS, CONTEXT = 16, 300
PROMPT = list(range(64))
RECORD = WorkerRecord(WorkerId("p"), Epoch(7), Role.PREFILL, "host:1", "m", SPEC, CONTEXT, 997, NUM_BLOCKS, 4)
DECODE = Identity(WorkerId("d"), Epoch(9), SPEC)
ID = HandoffId(RequestId("r"), 1)


class Runner(HashRunner):
    """Fails in its n-th step, if told."""

    steps_to_failure: int | None = None

    def run(self, work: Any) -> Any:
        if self.steps_to_failure is not None:
            self.steps_to_failure -= 1
            if self.steps_to_failure < 0:
                self.steps_to_failure = None
                raise RuntimeError("the device is gone")
        return super().run(work)


@dataclass
class Gateway:
    """One session's end: sends commands, waits for events."""

    service: PrefillService
    commands: "asyncio.Queue[pb.PrefillCommands | None]" = field(default_factory=asyncio.Queue)
    events: list[pb.PrefillEvent] = field(default_factory=list)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, **command: Any) -> None:
        self.commands.put_nowait(pb.PrefillCommands(commands=[pb.PrefillCommand(**command)]))

    async def _messages(self) -> AsyncIterator[pb.PrefillCommands]:
        while (message := await self.commands.get()) is not None:
            yield message

    async def listen(self) -> None:
        async for message in self.service.Session(self._messages(), None):
            self.events += message.events
            self._arrived.set()

    async def until(self, kind: str) -> Any:
        """The first event of that kind, removed with those before it."""
        async with asyncio.timeout(5):
            while True:
                for index, event in enumerate(self.events):
                    if event.WhichOneof("event") == kind:
                        del self.events[: index + 1]
                        return getattr(event, kind)
                self._arrived.clear()
                await self._arrived.wait()


class Rig:
    def __init__(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS)
        self.runner = Runner(NUM_BLOCKS, SPEC.block_size)
        limits = SchedulerLimits(SPEC.block_size, 16, 4, CONTEXT)
        tier = PrefillTier(Engine(Scheduler(limits, self.pool, monotonic), self.runner), "model")
        tier.engine.on_scheduled = tier.announce
        self.engine = InlineEngine(tier)
        self.network = LoopbackNetwork()
        self.regions = [KVRegion.create(SPEC.block_bytes, NUM_BLOCKS) for _ in range(2)]
        self.identity = Identity(RECORD.worker_id, RECORD.epoch, SPEC)
        options = TransferOptions(grace_s=0.2)
        self.senders = create_senders("loopback", self.regions[0], self.identity, options, self.network)
        self.signer = GrantSigner()
        self.receivers: ReceiverSet = create_receivers(
            ["loopback"], self.regions[1], DECODE, self.signer.verify, options, self.network
        )
        publisher = BlockPublisher(Store("redis://127.0.0.1:1"), RECORD.worker_id, RECORD.epoch)
        hello = convert.hello_to_proto(RECORD)
        self.service = PrefillService(hello, self.identity, self.engine, self.senders, publisher)  # type: ignore[arg-type]

    def grant(
        self,
        num_tokens: int = len(PROMPT),
        num_blocks: int = 4,
        num_cached_tokens: int = 0,
        handoff_id: HandoffId = ID,
    ) -> Grant:
        blocks = tuple(BlockId(block) for block in range(num_blocks))
        addresses = tuple(self.receivers.addresses)
        grant = Grant(
            handoff_id, DECODE.worker_id, DECODE.epoch, num_tokens, num_cached_tokens, blocks, addresses
        )
        return self.signer.sign(grant)

    async def is_idle(self) -> bool:
        is_empty = not self.service.num_handoffs and not self.engine.tier.num_waiting
        return is_empty and self.pool.num_available == NUM_BLOCKS

    async def no_delivery(self) -> bool:
        return not [task for task in self.service._tasks if "_deliver" in str(task.get_coro())]


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    await made.receivers.start()
    tasks = [asyncio.create_task(made.engine.run()), asyncio.create_task(made.service.follow_engine())]
    yield made
    for task in (*tasks, *made.service._tasks):
        task.cancel()
    await asyncio.gather(*tasks, *made.service._tasks, return_exceptions=True)
    await made.senders.close()
    await made.receivers.close()
    for region in made.regions:
        region.close()


@asynccontextmanager
async def session(rig: Rig) -> AsyncIterator[Gateway]:
    gateway = Gateway(rig.service)
    listening = asyncio.create_task(gateway.listen())
    await gateway.until("hello")
    yield gateway
    gateway.commands.put_nowait(None)
    await asyncio.wait([listening])
    listening.result()


async def eventually(holds: Any) -> None:
    async with asyncio.timeout(5):
        while not await holds():
            await asyncio.sleep(0.005)


def start(epoch: int = RECORD.epoch, **fields: Any) -> dict[str, Any]:
    worker = convert.identity_to_proto(RECORD.worker_id, Epoch(epoch))
    sampling = convert.sampling_to_proto(SamplingParams(8, 0.0))
    values = {"prompt_ids": PROMPT, **fields}
    message = pb.PrefillStart(handoff_id=HANDOFF, worker=worker, sampling=sampling, deadline_s=60, **values)
    return {"start": message}


HANDOFF = convert.handoff_id_to_proto(ID)
ABORT = {"abort": pb.Abort(handoff_id=HANDOFF, reason="test")}
RELEASE = {"release": pb.PrefillRelease(handoff_id=HANDOFF)}


def granted(grant: Grant) -> dict[str, Any]:
    return {"grant": pb.PrefillGrant(grant=convert.grant_to_proto(grant))}


async def test_a_handoff_from_start_to_release(rig):
    async with session(rig) as gateway:
        gateway.send(**start())
        await gateway.until("started")
        grant = rig.grant()
        rig.receivers.expect(grant)
        gateway.send(**granted(grant))
        first = await gateway.until("first_token")
        sealed = await gateway.until("sealed")
        seal = await rig.receivers.wait_sealed(ID, 5)
        assert (sealed.num_bytes, sealed.connector) == (4 * SPEC.block_bytes, "loopback")
        assert seal.first_tokens[0].token_id == first.first_tokens[0].token_id
        gateway.send(**RELEASE)
        await eventually(rig.is_idle)


async def test_an_engine_failure_during_a_transfer_ends_the_transfer_too(rig):
    rig.runner.steps_to_failure = 2
    rig.engine.can_step.clear()
    async with session(rig) as gateway:
        gateway.send(**start())
        await gateway.until("queued")
        grant = rig.grant()
        rig.receivers.expect(grant)
        gateway.send(**granted(grant))
        rig.engine.can_step.set()
        failed = await gateway.until("failed")
        assert failed.error.code == ErrorCode.ENGINE
        await gateway.until("aborted")
        await eventually(rig.no_delivery)
        await eventually(rig.is_idle)
        assert await rig.receivers.cancel(ID)


async def test_an_abort_during_a_transfer_is_answered_when_nothing_reads_the_blocks(rig):
    rig.engine.can_step.clear()
    async with session(rig) as gateway:
        gateway.send(**start())
        await gateway.until("queued")
        grant = rig.grant()
        rig.receivers.expect(grant)
        gateway.send(**granted(grant))
        gateway.send(**ABORT)
        gateway.send(**ABORT)
        rig.engine.can_step.set()
        assert (await gateway.until("aborted")).is_quiet
        await eventually(rig.no_delivery)
        await eventually(rig.is_idle)


async def test_an_abort_may_come_before_the_start(rig):
    async with session(rig) as gateway:
        gateway.send(**ABORT)
        assert (await gateway.until("aborted")).is_quiet
        gateway.send(**start())
        assert (await gateway.until("failed")).error.code == ErrorCode.CANCELLED
        assert await rig.is_idle()


async def test_a_salt_that_is_too_long_is_refused(rig):
    async with session(rig) as gateway:
        gateway.send(**start(cache_salt=b"x" * 65))
        error = (await gateway.until("failed")).error
        assert (error.code, error.field) == (ErrorCode.INVALID, "cache_salt")
        gateway.send(**start(cache_salt=b"x" * 64))
        await gateway.until("started")
        gateway.send(**ABORT)
        await gateway.until("aborted")
        await eventually(rig.is_idle)


async def test_another_incarnations_commands_are_refused(rig):
    async with session(rig) as gateway:
        gateway.send(**start(epoch=8))
        assert (await gateway.until("failed")).error.code == ErrorCode.STALE
        gateway.send(**granted(rig.grant()))
        assert (await gateway.until("failed")).error.code == ErrorCode.STALE
        assert await rig.is_idle()


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_tokens": 48},
        {"num_blocks": 9},
        {"num_blocks": 2},
        {"num_cached_tokens": 7},
        {"num_cached_tokens": 512},
    ],
    ids=str,
)
async def test_a_grant_that_does_not_fit_the_prompt_is_a_failed_transfer(rig, wrong):
    async with session(rig) as gateway:
        gateway.send(**start())
        await gateway.until("started")
        grant = rig.grant(**wrong)
        rig.receivers.expect(grant)
        gateway.send(**granted(grant))
        assert (await gateway.until("failed")).error.code == ErrorCode.TRANSFER
        await eventually(rig.is_idle)


async def test_a_session_that_ends_aborts_its_own_handoffs_and_no_others(rig):
    async with session(rig) as stays:
        async with session(rig) as leaves:
            leaves.send(**start())
            await leaves.until("first_token")
            other = convert.handoff_id_to_proto(HandoffId(RequestId("other"), 1))
            message = start()["start"]
            message.handoff_id.CopyFrom(other)
            stays.send(start=message)
            await stays.until("first_token")

        async def only_the_other() -> bool:
            return list(rig.service._entries) == [HandoffId(RequestId("other"), 1)]

        await eventually(only_the_other)
    await eventually(rig.is_idle)


@pytest.mark.parametrize("what_failed", ["transfer", "nothing"])
async def test_another_attempt_sends_the_leased_blocks_again(rig, what_failed):
    """To a new grant, under its own id; the earlier attempt is over and holds nothing."""
    async with session(rig) as gateway:
        gateway.send(**start())
        await gateway.until("first_token")
        if what_failed == "transfer":
            grant = rig.grant()
            rig.receivers.expect(grant)
            await rig.receivers.cancel(ID)
            gateway.send(**granted(grant))
            await gateway.until("failed")
        again = start(takes_over=1)["start"]
        again.handoff_id.attempt = 2
        gateway.send(start=again)
        await gateway.until("started")
        await gateway.until("first_token")
        second = HandoffId(ID.request_id, 2)
        grant = rig.grant(handoff_id=second)
        rig.receivers.expect(grant)
        gateway.send(**granted(grant))
        await gateway.until("sealed")
        seal = await rig.receivers.wait_sealed(second, 5)
        assert seal.num_tokens == len(PROMPT)
        gateway.send(**ABORT)
        assert (await gateway.until("aborted")).handoff_id.attempt == 1
        gateway.send(release=pb.PrefillRelease(handoff_id=again.handoff_id))
        await eventually(rig.is_idle)


async def test_a_handoff_that_its_gateway_forgets_ends_by_itself(rig, monkeypatch):
    monkeypatch.setattr("cluster.handoff_host.EXPIRY_SLACK_S", 0.05)
    async with session(rig) as gateway:
        message = start()["start"]
        message.deadline_s = 0.05
        gateway.send(start=message)
        await gateway.until("first_token")
        assert (await gateway.until("failed")).error.code == ErrorCode.DEADLINE
        await eventually(rig.is_idle)


async def test_repeated_starts_and_unknown_releases_are_harmless(rig):
    async with session(rig) as gateway:
        gateway.send(**RELEASE)
        gateway.send(**start())
        gateway.send(**start())
        await gateway.until("first_token")
        gateway.send(**start())
        gateway.send(**RELEASE)
        gateway.send(**RELEASE)
        await eventually(rig.is_idle)
        gateway.send(**start())
        assert (await gateway.until("failed")).error.code == ErrorCode.CANCELLED
