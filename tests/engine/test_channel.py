"""The pipe between a service and its engine process, and the engine's loop at its end: over a real socket pair."""

import asyncio
import pickle
import socket
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from core.clock import monotonic
from core.errors import ErrorCode
from core.ids import HandoffId, RequestId
from core.load import Load
from core.sampling import SamplingParams
from engine.block_pool import BlockPool
from engine.channel import EngineChannel, ServiceChannel
from engine.engine import Engine
from engine.hash_runner import HashRunner, expected_outputs
from engine.messages import (
    AbortWork,
    AnyEvent,
    Commands,
    Event,
    First,
    Loading,
    Release,
    Report,
    Started,
    StartPrompt,
    WorkAborted,
    WorkFailed,
)
from engine.scheduler import Sampled, Scheduler, SchedulerLimits, Work
from engine.worker_loop import Tier, run_worker

BLOCK, NUM_BLOCKS, CONTEXT = 16, 16, 300
UNKNOWN = msgspec.msgpack.encode({"type": "Commands", "commands": [{"type": "Reap"}]})
ENDINGS = (OSError, AssertionError, LookupError, msgspec.MsgspecError)


def id_of(number: int) -> HandoffId:
    return HandoffId(RequestId(str(number)), 1)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def encoded(commands: Commands) -> bytes:
    return frame(msgspec.msgpack.encode(commands))


def test_messages_that_came_together_or_in_pieces_are_taken_whole_and_in_order(pair):
    service, engine = pair
    channel = EngineChannel(engine)
    messages = [Commands([AbortWork(id_of(number))]) for number in range(3)]
    data = b"".join(map(encoded, messages))
    service.sendall(data[:-5])
    assert channel.receive(1.0) == messages[:2]
    assert channel.receive(0.0) == []
    service.sendall(data[-5:])
    assert channel.receive(1.0) == messages[2:]


def test_another_thread_wakes_the_one_that_waits(pair):
    channel = EngineChannel(pair[1])
    waking = threading.Timer(0.05, channel.wake)
    waking.start()
    assert channel.receive(None) == [], "returned, and without a message"
    waking.join()
    channel.wake()
    assert channel.receive(None) == [], "also when it was woken before"


def test_the_end_of_the_service_is_told_from_silence(pair):
    service, engine = pair
    channel = EngineChannel(engine)
    assert channel.receive(0.0) == []
    service.close()
    assert channel.receive(None) is None


def test_a_service_that_closes_with_reports_unread_has_ended_all_the_same(pair):
    service, engine = pair
    channel = EngineChannel(engine)
    channel.send(Report([]))
    service.close()
    assert channel.receive(None) is None
    with pytest.raises(ConnectionError):
        channel.send(Report([]))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x90",
        pickle.dumps(Load()),
        UNKNOWN,
    ],
    ids=["empty", "not msgpack", "a list", "a pickle", "an unknown command"],
)
def test_what_is_no_message_is_refused(pair, body):
    service, engine = pair
    service.sendall(frame(body))
    with pytest.raises(msgspec.MsgspecError):
        EngineChannel(engine).receive(1.0)


async def test_the_service_reads_reports_until_the_engine_is_gone(pair):
    service, engine = pair
    channel = await ServiceChannel.open(service)
    ends = EngineChannel(engine)
    sent = [Loading(1, 2), Report([WorkAborted(id_of(1))], Load(num_blocks=3), [(True, b"h" * 16)])]
    for message in sent:
        ends.send(message)
    assert [await channel.receive(), await channel.receive()] == sent
    engine.sendall(struct.pack("<I", 100) + b"half")
    engine.close()
    assert await channel.receive() is None
    channel.close()


class Runner(HashRunner):
    """Raises for a batch that holds the prompt `[666, ...]`."""

    def run(self, work: list[Work]) -> dict[HandoffId, Sampled]:
        if any(item.sequence.tokens[0] == 666 for item in work):
            raise RuntimeError("the device is gone")
        return super().run(work)


def make_engine() -> Engine:
    limits = SchedulerLimits(BLOCK, 64, 4, CONTEXT)
    return Engine(Scheduler(limits, BlockPool(NUM_BLOCKS), monotonic), Runner(NUM_BLOCKS, BLOCK))


class Worker:
    """The loop in a thread of its own; `error` is what ended it."""

    def __init__(self, connection: socket.socket, tier: Tier) -> None:
        self.error: Exception | None = None
        self._run = (EngineChannel(connection), tier)
        self.thread = threading.Thread(target=self._main)
        self.thread.start()

    def _main(self) -> None:
        try:
            run_worker(*self._run)
        except ENDINGS as error:
            self.error = error
            self._run[0]._connection.close()


class Service:
    """The other end: sends commands, gathers events."""

    def __init__(self, channel: ServiceChannel, worker: Worker) -> None:
        self.channel = channel
        self.worker = worker
        self.reports: list[Report] = []

    async def until(self, kind: type[Event], number: int) -> AnyEvent:
        while True:
            report = await self.channel.receive()
            assert isinstance(report, Report)
            self.reports.append(report)
            for event in report.events:
                if isinstance(event, kind) and event.id == id_of(number):
                    return event


@asynccontextmanager
async def running(pair: tuple[socket.socket, socket.socket], tier: Tier) -> AsyncIterator[Service]:
    worker = Worker(pair[1], tier)
    channel = await ServiceChannel.open(pair[0])
    try:
        yield Service(channel, worker)
    finally:
        channel.close()
        await asyncio.to_thread(worker.thread.join, 10)
        assert not worker.thread.is_alive()


@pytest.fixture
def tier() -> Tier:
    from prefill_service.scheduler import PrefillTier

    return PrefillTier(make_engine(), "model")


def start(number: int, prompt: list[int]) -> StartPrompt:
    return StartPrompt(id_of(number), prompt, [], SamplingParams(4, 0.0))


async def test_commands_go_down_events_load_and_cache_changes_come_up(pair, tier):
    async with running(pair, tier) as service:
        ready = await service.channel.receive()
        assert ready == Report([], ready.load)
        assert ready.load.num_free_blocks == NUM_BLOCKS
        service.channel.send(Commands([start(1, list(range(40)))]))
        first = await service.until(First, 1)
        assert (
            first.first_tokens[0].token_id == expected_outputs(range(40), SamplingParams(1, 0.0), CONTEXT)[0]
        )
        assert isinstance(service.reports[0].events[0], Started), "it does not wait for the step"
        assert len(service.reports) == 2
        stored = [is_stored for report in service.reports for is_stored, _ in report.cache_changes]
        assert stored == [True, True]
        assert service.reports[-1].load.blocks_by_state["leased"] == 3
        service.channel.send(Commands([Release(id_of(1)), AbortWork(id_of(1))]))
        await service.until(WorkAborted, 1)
        assert service.reports[-1].load.num_free_blocks == NUM_BLOCKS
    assert service.worker.error is None


async def test_a_step_that_raises_ends_its_requests_and_the_loop_goes_on(pair, tier):
    async with running(pair, tier) as service:
        service.channel.send(Commands([start(1, [666]), start(2, [5])]))
        failed = await service.until(WorkFailed, 1)
        assert failed.code == ErrorCode.ENGINE
        assert "the device is gone" in failed.message
        service.channel.send(Commands([start(3, [5, 6])]))
        await service.until(First, 3)
    assert service.worker.error is None


async def test_the_loop_ends_when_the_service_closes_in_the_middle_of_work(pair, tier):
    async with running(pair, tier) as service:
        for number in range(50):
            service.channel.send(Commands([start(number, [number] * 100)]))
        await service.until(Started, 0)
    assert service.worker.error is None or isinstance(service.worker.error, ConnectionError)


async def test_a_malformed_frame_ends_the_loop(pair, tier):
    async with running(pair, tier) as service:
        service.channel._writer.write(frame(b"\xc1"))
        await service.channel.receive()
        assert await service.channel.receive() is None
    assert isinstance(service.worker.error, msgspec.MsgspecError)


class Broken(Scheduler):
    def schedule(self) -> list[Work]:
        raise LookupError("the queue is broken")


async def test_scheduling_that_fails_ends_the_loop_rather_than_spinning(pair, tier):
    """No request of a step is to blame, so none can be failed: another process must take over."""
    scheduler = tier.engine.scheduler
    tier.engine.scheduler = Broken(scheduler.limits, scheduler.pool, scheduler.clock)
    async with running(pair, tier) as service:
        assert await service.channel.receive() is not None
        assert await service.channel.receive() is None
    assert isinstance(service.worker.error, LookupError)


async def test_an_idle_loop_proves_its_pool_and_ends_when_it_is_wrong(pair, tier):
    tier.engine.scheduler.pool._counts["free"] -= 1  # type: ignore[index]
    async with running(pair, tier) as service:
        assert isinstance(await service.channel.receive(), Report)
        assert await service.channel.receive() is None
    assert isinstance(service.worker.error, AssertionError)
