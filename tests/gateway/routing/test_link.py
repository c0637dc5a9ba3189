"""Links and the fleet over real gRPC sessions with a worker double, and a real registry."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from cluster.registry import Registration, Registry
from cluster.session import SessionHost
from cluster.store import Store
from cluster.valkey import EmbeddedValkey
from cluster.worker_server import SERVER_OPTIONS
from core.ids import Epoch, HandoffId, RequestId, WorkerId
from core.kv_spec import DType, KVSpec
from core.load import Load
from core.worker import Role, WorkerRecord
from gateway.front import grpc_server
from gateway.routing.fleet import Fleet
from gateway.routing.link import FromWorker, Inbox, LinkLost, WorkerLink
from gateway.routing.prefix_index import PrefixIndex
from gateway.routing.worker_table import WorkerTable
from proto import convert, session_pb2_grpc
from proto import session_pb2 as pb

SPEC = KVSpec(2, 2, 16, 16, DType.FLOAT32, "m")
LIMIT_S = 10.0


class Double(SessionHost[pb.DecodeCommand, pb.DecodeEvent], session_pb2_grpc.DecodeServicer):
    """A decode worker that greets, and answers each abort with a token and the end."""

    def __init__(self) -> None:
        super().__init__()
        self.hello = pb.WorkerHello()
        self.commands: list[pb.DecodeCommand] = []
        self.num_ended = 0

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[pb.DecodeEvents]:
        async def commands() -> AsyncIterator[pb.DecodeCommand | None]:
            async for message in requests:
                yield None
                for command in message.commands:
                    yield command

        async for batch in self.serve(pb.DecodeEvent(hello=self.hello), commands()):
            load = Load(num_blocks=64, num_free_blocks=5, is_draining=self.is_draining)
            yield pb.DecodeEvents(events=batch, load=convert.load_to_proto(load))

    def on_command(self, command: pb.DecodeCommand, events: Any) -> None:
        self.commands.append(command)
        if command.HasField("abort"):
            handoff_id = command.abort.handoff_id
            events.put(pb.DecodeEvent(token=pb.DecodeToken(handoff_id=handoff_id, position=1)))
            events.put(pb.DecodeEvent(aborted=pb.Aborted(handoff_id=handoff_id, is_quiet=True)))

    def on_session_end(self, events: Any) -> None:
        self.num_ended += 1


@asynccontextmanager
async def worker(
    name: str = "d0", port: int = 0
) -> AsyncIterator[tuple[Double, WorkerRecord, grpc.aio.Server]]:
    double = Double()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    session_pb2_grpc.add_DecodeServicer_to_server(double, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    epoch = Epoch(sum(name.encode()))
    record = WorkerRecord(WorkerId(name), epoch, Role.DECODE, f"127.0.0.1:{port}", "m", SPEC, 512, 300, 64, 8)
    double.hello = convert.hello_to_proto(record)
    await server.start()
    try:
        yield double, record, server
    finally:
        await server.stop(0)


def id_of(number: int) -> HandoffId:
    return HandoffId(RequestId(f"r{number}"), 1)


def abort(number: int) -> pb.DecodeCommand:
    return pb.DecodeCommand(abort=pb.Abort(handoff_id=convert.handoff_id_to_proto(id_of(number))))


async def bounded(work: Any) -> Any:
    async with asyncio.timeout(LIMIT_S):
        return await work


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():
            await asyncio.sleep(0.01)


async def test_a_link_greets_sends_and_hands_each_event_to_whoever_waits_for_it():
    async with worker() as (double, record, _):
        link = WorkerLink(WorkerTable().add(record), "gateway-1")
        running = asyncio.create_task(link.run())
        await bounded(link.up.wait())
        inboxes: list[Inbox] = [asyncio.Queue(), asyncio.Queue()]
        for number, inbox in enumerate(inboxes):
            link.subscribe(id_of(number), inbox)
        assert link.num_open == 2
        link.send(abort(1))
        kinds = [(await bounded(inboxes[1].get())).kind for _ in range(2)]
        assert kinds == ["token", "aborted"]
        assert inboxes[0].empty()
        assert link.load == Load(num_blocks=64, num_free_blocks=5)
        assert double.commands[0].hello.gateway_id == "gateway-1"
        link.unsubscribe(id_of(1))
        link.send(abort(1))
        link.send(abort(0))
        assert isinstance(await bounded(inboxes[0].get()), FromWorker)
        assert inboxes[1].empty()
        running.cancel()
        await asyncio.wait([running])
        await eventually(lambda: double.num_ended == 1)


async def test_the_end_of_a_session_is_told_to_every_handoff_once():
    async with worker() as (_, record, server):
        link = WorkerLink(WorkerTable().add(record), "g")
        running = asyncio.create_task(link.run())
        await bounded(link.up.wait())
        inbox: Inbox = asyncio.Queue()
        link.subscribe(id_of(0), inbox)
        await server.stop(0)
        reason = await bounded(running)
        assert inbox.get_nowait() == LinkLost(record, reason)
        assert inbox.empty()
        assert not link.is_up
        link.subscribe(id_of(1), inbox)
        assert isinstance(inbox.get_nowait(), LinkLost)
        link.send(abort(1))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda hello: setattr(hello.worker, "epoch", 4), "restarted"),
        (lambda hello: setattr(hello.kv_spec, "block_size", 32), "block_size"),
        (lambda hello: setattr(hello.kv_spec, "fingerprint", "other"), "fingerprint"),
        (lambda hello: setattr(hello.kv_spec, "dtype", "int4"), "int4"),
    ],
    ids=["another epoch", "another geometry", "another model", "an unknown dtype"],
)
async def test_whoever_else_answers_at_that_address_is_no_session(change, why):
    async with worker() as (double, record, _):
        change(double.hello)
        link = WorkerLink(WorkerTable().add(record), "g")
        assert why in await bounded(link.run())
        assert not link.was_up


async def test_nobody_at_the_address_is_an_end_too():
    async with worker() as (_, record, server):
        await server.stop(0)
        assert "UNAVAILABLE" in await bounded(WorkerLink(WorkerTable().add(record), "g").run())


@asynccontextmanager
async def fleet_of(
    *records: WorkerRecord,
) -> AsyncIterator[tuple[Fleet, EmbeddedValkey, list[asyncio.Task[None]]]]:
    """A running fleet, a registry with those records, and the registrations."""
    valkey = await EmbeddedValkey.start()
    store = Store(valkey.url)

    async def returned() -> None:
        return None

    presences = [asyncio.create_task(Registration(store, record, Load, returned).run()) for record in records]
    fleet = Fleet(Registry(store), "m", PrefixIndex(store))
    running = asyncio.create_task(fleet.run())
    try:
        yield fleet, valkey, presences
    finally:
        for task in (running, *presences):
            task.cancel()
        await asyncio.gather(running, *presences, return_exceptions=True)
        await store.close()
        await valkey.stop()


def up(fleet: Fleet) -> list[str]:
    return sorted(candidate.record.worker_id for candidate in fleet.candidates(Role.DECODE))


async def test_registered_workers_are_connected_and_dead_ones_forgotten():
    async with (
        worker("d0") as (_, one, _server),
        worker("d1") as (_, two, server),
        fleet_of(one, two) as (fleet, _valkey, presences),
    ):
        await eventually(lambda: up(fleet) == ["d0", "d1"])
        assert fleet.fingerprint == "m"
        assert not fleet.is_ready, "there is no prefill worker"
        presences[1].cancel()
        await server.stop(0)
        await eventually(lambda: len(fleet.links) == 1)
        assert up(fleet) == ["d0"]


async def test_a_worker_that_is_still_registered_is_connected_again_and_its_absence_told_once(caplog):
    caplog.set_level(logging.INFO, "gateway")
    async with worker("d0") as (_, record, server):
        port = int(record.address.rpartition(":")[2])
        async with fleet_of(record) as (fleet, _, _presences):
            await eventually(lambda: up(fleet) == ["d0"])
            await server.stop(0)
            await eventually(lambda: up(fleet) == [])
            await asyncio.sleep(1.0)
            lines = [line for line in caplog.messages if line.startswith("no session")]
            assert 1 <= len(lines) <= 2, lines
            async with worker("d0", port):
                await eventually(lambda: up(fleet) == ["d0"])


async def test_an_open_session_outranks_an_expired_registration():
    async with worker("d0") as (_, record, _server), fleet_of(record) as (fleet, valkey, presences):
        await eventually(lambda: up(fleet) == ["d0"])
        presences[0].cancel()
        os.kill(valkey.pid, signal.SIGSTOP)
        await asyncio.sleep(1.0)
        os.kill(valkey.pid, signal.SIGCONT)
        store = Store(valkey.url)
        await store.redis.flushall()
        await eventually(lambda: not fleet._registered)
        assert up(fleet) == ["d0"]
        await store.close()


async def test_workers_of_another_model_or_geometry_are_not_used_and_that_is_told_once(caplog):
    async with worker("d0") as (_, record, _server):
        small = replace(record, worker_id=WorkerId("small"), kv_spec=replace(SPEC, block_size=32))
        other = replace(record, worker_id=WorkerId("other"), model="another")
        async with fleet_of(record, small, other) as (fleet, _, _presences):
            await eventually(lambda: up(fleet) == ["d0"])
            await asyncio.sleep(1.2)
            assert [candidate.record.worker_id for candidate in fleet.candidates(Role.DECODE)] == ["d0"]
    refused = [line for line in caplog.messages if "refused" in line]
    assert len(refused) == 1
    assert "block_size: 16 here, 32 there" in refused[0]


async def test_a_worker_that_drains_is_sent_nothing_new_and_keeps_its_session():
    async with worker("d0") as (double, record, _server), fleet_of(record) as (fleet, _, _presences):
        await eventually(lambda: up(fleet) == ["d0"])
        double.drain()
        await eventually(lambda: up(fleet) == [])
        assert fleet.draining == {"d0"}
        assert fleet.links[0].is_up


async def test_a_command_as_large_as_a_request_may_be_crosses_the_session():
    reserve = pb.DecodeReserve(prompt_ids=[2**31] * 3_500_000)
    assert reserve.ByteSize() > grpc_server.MAX_MESSAGE_BYTES
    async with worker() as (double, record, _):
        link = WorkerLink(WorkerTable().add(record), "g")
        running = asyncio.create_task(link.run())
        await bounded(link.up.wait())
        link.send(pb.DecodeCommand(reserve=reserve))
        await eventually(lambda: double.commands[-1].HasField("reserve"))
        assert len(double.commands[-1].reserve.prompt_ids) == len(reserve.prompt_ids)
        assert link.is_up
        running.cancel()
        await asyncio.wait([running])
