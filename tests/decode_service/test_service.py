"""The decode tier's service between a gateway's session, the real tier and real receivers. The engine's process is a
task here; what it computes is hashes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from cluster.block_index import BlockPublisher
from cluster.store import Store
from core.clock import monotonic
from core.errors import ErrorCode
from core.grant import GrantSigner
from core.handoff import HandoffState
from core.ids import Epoch, HandoffId, RequestId, WorkerId
from core.kv_region import KVRegion
from core.kv_spec import DType, KVSpec
from core.sampling import SamplingParams
from core.worker import Role, WorkerRecord
from decode_service.scheduler import DecodeTier
from decode_service.service import DecodeService
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.hash_runner import HashRunner, expected_outputs
from engine.messages import Report, Token
from engine.scheduler import Scheduler, SchedulerLimits
from kv_transfer.base import Identity
from kv_transfer.connectors import create_receivers
from kv_transfer.granting import Granter
from kv_transfer.loopback import LoopbackNetwork
from proto import convert
from proto import session_pb2 as pb
from tests.engine.inline_engine import InlineEngine

SPEC = KVSpec(1, 1, 2, 16, DType.FLOAT16, "model")
NUM_BLOCKS, CONTEXT = 16, 300
RECORD = WorkerRecord(WorkerId("d"), Epoch(7), Role.DECODE, "host:1", "m", SPEC, CONTEXT, 997, NUM_BLOCKS, 4)
PARAMS = SamplingParams(6, 0.0)


class Rig:
    """The service with one session."""

    def __init__(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS)
        limits = SchedulerLimits(SPEC.block_size, 64, 4, CONTEXT)
        engine = Engine(Scheduler(limits, self.pool, monotonic), HashRunner(NUM_BLOCKS, SPEC.block_size))
        self.engine = InlineEngine(DecodeTier(engine, "model"))
        self.region = KVRegion.create(SPEC.block_bytes, NUM_BLOCKS)
        signer = GrantSigner()
        identity = Identity(RECORD.worker_id, RECORD.epoch, SPEC)
        self.receivers = create_receivers(
            ["loopback"], self.region, identity, signer.verify, network=LoopbackNetwork()
        )
        granter = Granter(RECORD.worker_id, RECORD.epoch, signer, self.receivers)
        publisher = BlockPublisher(Store("redis://127.0.0.1:1"), RECORD.worker_id, RECORD.epoch)
        self.service = DecodeService(convert.hello_to_proto(RECORD), self.engine, granter, publisher)  # type: ignore[arg-type]
        self._commands: asyncio.Queue[pb.DecodeCommands | None] = asyncio.Queue()
        self._events: asyncio.Queue[pb.DecodeEvent] = asyncio.Queue()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.engine.run())
            group.create_task(self.service.follow_engine())
            group.create_task(self._listen())

    async def _messages(self) -> AsyncIterator[pb.DecodeCommands]:
        while (message := await self._commands.get()) is not None:
            yield message

    async def _listen(self) -> None:
        async for message in self.service.Session(self._messages(), None):
            for event in message.events:
                self._events.put_nowait(event)

    def send(self, **command: Any) -> None:
        self._commands.put_nowait(pb.DecodeCommands(commands=[pb.DecodeCommand(**command)]))

    async def take(self, kind: str) -> Any:
        """The next event, which must be of that kind."""
        async with asyncio.timeout(5):
            event = await self._events.get()
        assert event.WhichOneof("event") == kind, event
        return getattr(event, kind)

    def is_idle(self) -> bool:
        return not self.service.num_handoffs and self.pool.num_available == NUM_BLOCKS


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    await made.receivers.start()
    running = asyncio.create_task(made.run())
    await made.take("hello")
    yield made
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled(), "nothing of it ended by itself"
    await made.receivers.close()
    made.region.close()


def id_of(number: int) -> HandoffId:
    return HandoffId(RequestId(f"r{number}"), 1)


def reserve(
    number: int, is_local: bool = False, epoch: int = RECORD.epoch, cache_salt: bytes = b""
) -> dict[str, Any]:
    return {
        "reserve": pb.DecodeReserve(
            handoff_id=convert.handoff_id_to_proto(id_of(number)),
            worker=convert.identity_to_proto(RECORD.worker_id, Epoch(epoch)),
            prompt_ids=range(40),
            sampling=convert.sampling_to_proto(PARAMS),
            deadline_s=60,
            credit=100,
            is_local=is_local,
            cache_salt=cache_salt,
        )
    }


def abort(number: int) -> dict[str, Any]:
    return {"abort": pb.Abort(handoff_id=convert.handoff_id_to_proto(id_of(number)))}


async def test_a_reserve_is_granted_and_an_abort_gives_it_back(rig):
    rig.send(**reserve(1))
    grant = convert.grant_from_proto((await rig.take("granted")).grant)
    assert (grant.num_prompt_tokens, len(grant.block_ids)) == (40, 3)
    assert grant.addresses == rig.receivers.addresses
    rig.send(**abort(1))
    assert (await rig.take("aborted")).is_quiet
    assert rig.is_idle()
    rig.send(**reserve(1))
    assert (await rig.take("failed")).error.code == ErrorCode.CANCELLED


async def test_a_handoff_that_the_receivers_know_to_be_over_fails_alone(rig):
    """Their memory is longer than the service's; the worker must survive the difference."""
    await rig.receivers.cancel(id_of(1))
    rig.send(**reserve(1))
    assert (await rig.take("failed")).error.code == ErrorCode.STALE
    await rig.take("aborted")
    rig.send(**reserve(2))
    await rig.take("granted")
    rig.send(**abort(2))
    await rig.take("aborted")
    assert rig.is_idle()


async def test_a_prompt_prefilled_here_streams_all_its_tokens(rig):
    rig.send(**reserve(1, is_local=True))
    tokens = [await rig.take("token") for _ in range(6)]
    assert [token.token_id for token in tokens] == expected_outputs(range(40), PARAMS, CONTEXT)
    assert [token.position for token in tokens] == list(range(6))
    assert rig.is_idle()


async def test_commands_for_what_is_not_there_are_answered_or_harmless(rig):
    rig.send(credit=pb.DecodeCredit(handoff_id=convert.handoff_id_to_proto(id_of(5)), num_tokens=3))
    rig.send(**reserve(1, epoch=8))
    assert (await rig.take("failed")).error.code == ErrorCode.STALE
    rig.send(**abort(5))
    assert (await rig.take("aborted")).is_quiet
    assert rig.is_idle()


async def test_a_salt_that_is_too_long_is_refused_and_the_longest_is_not(rig):
    rig.send(**reserve(1, cache_salt=b"x" * 65))
    error = (await rig.take("failed")).error
    assert (error.code, error.field) == (ErrorCode.INVALID, "cache_salt")
    rig.send(**reserve(2, cache_salt=b"x" * 64))
    await rig.take("granted")
    rig.send(**abort(2))
    await rig.take("aborted")
    assert rig.is_idle()


async def test_a_last_token_that_meets_an_abort_is_no_second_end(rig):
    rig.engine.can_step.clear()
    rig.send(**reserve(1, is_local=True))
    while not rig.service.num_handoffs:
        await asyncio.sleep(0)
    rig.send(**abort(1))
    while rig.service.find(id_of(1)).handoff.lifetime.state is not HandoffState.ABORTED:
        await asyncio.sleep(0)
    rig.service._on_report(Report([Token(id_of(1), 0, 5, 1, 0.0, "length", 0.0, 0)]))
    rig.engine.can_step.set()
    for _ in range(2):  # that one, and the one of the step that was held
        await rig.take("token")
    assert (await rig.take("aborted")).is_quiet
    assert rig.is_idle()
