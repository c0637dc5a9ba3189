"""The gateway's end of one worker's session: connect, greet, send commands, hand each event to whoever waits for it.
Knows nothing of requests beyond their handoff ids."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from cluster.session import Outbox, heard_within
from core.clock import loop_time
from core.errors import TandemError, WorkerLost
from core.ids import HandoffId
from core.load import Load
from core.worker import Role, WorkerRecord
from gateway.routing.worker_table import WorkerRow
from proto import convert, session_pb2_grpc
from proto import session_pb2 as pb

logger = logging.getLogger(__name__)
RECONNECT_S = 0.2
MAX_MESSAGE_BYTES = 64 << 20
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
)

SessionEvent = pb.PrefillEvent | pb.DecodeEvent
SessionCommand = pb.PrefillCommand | pb.DecodeCommand


@dataclass(frozen=True, slots=True)
class LinkLost:
    """Put into every open inbox when the session breaks: nothing more will come from that worker."""

    worker: WorkerRecord
    reason: str


@dataclass(frozen=True, slots=True)
class FromWorker:
    """One event and the worker it came from."""

    worker: WorkerRecord
    kind: str
    body: Any


class Cancel:
    """Put into an inbox when the client asked for the end."""


CANCELLED = Cancel()
Inbox = asyncio.Queue[FromWorker | LinkLost | Cancel]


@dataclass(frozen=True, slots=True)
class _Dialect:
    """What differs between the tiers' sessions."""

    stub: Callable[[grpc.aio.Channel], Any]
    wrap: Callable[[Sequence[Any]], Any]
    hello: Callable[[pb.GatewayHello], Any]


_DIALECTS = {
    Role.PREFILL: _Dialect(
        session_pb2_grpc.PrefillStub,
        lambda batch: pb.PrefillCommands(commands=batch),
        lambda hello: pb.PrefillCommand(hello=hello),
    ),
    Role.DECODE: _Dialect(
        session_pb2_grpc.DecodeStub,
        lambda batch: pb.DecodeCommands(commands=batch),
        lambda hello: pb.DecodeCommand(hello=hello),
    ),
}

OpenSession = Callable[[WorkerRecord, AsyncIterator[Any]], AsyncGenerator[Any, None]]
"""Command messages to a worker in, its event messages out. Raises WorkerLost when it cannot be reached."""


async def open_grpc_session(record: WorkerRecord, commands: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
    """A session over gRPC, for as long as the iterator lives."""
    try:
        async with grpc.aio.insecure_channel(record.address, options=CHANNEL_OPTIONS) as channel:
            async for message in _DIALECTS[record.role].stub(channel).Session(commands):
                yield message
    except grpc.aio.AioRpcError as error:
        raise WorkerLost(f"{error.code().name}: {error.details()}") from error


class WorkerLink:
    """One session with one incarnation of one worker. `run()` ends when the session does; the owner opens another."""

    def __init__(
        self, row: WorkerRow, gateway_id: str, open_session: OpenSession = open_grpc_session
    ) -> None:
        """`row` is where routing reads of this worker: kept true here."""
        self.record = row.record
        self.row = row
        self.up = asyncio.Event()
        self.was_up = False
        self.heard_s: float | None = None  # on the loop's clock: when the worker last said anything
        self._gateway_id = gateway_id
        self._open_session = open_session
        self._dialect = _DIALECTS[row.record.role]
        self._outbox: Outbox[Any] = Outbox()
        self._inboxes: dict[HandoffId, Inbox] = {}

    @property
    def is_up(self) -> bool:
        """The worker has greeted and the session has not ended."""
        return self.up.is_set()

    @property
    def load(self) -> Load:
        """As it was published last."""
        return self.row.load

    @property
    def num_open(self) -> int:
        """Handoffs of this gateway on that worker."""
        return len(self._inboxes)

    def subscribe(self, handoff_id: HandoffId, inbox: Inbox) -> None:
        """From now on every event of the handoff goes to `inbox`, in order, until unsubscribe()."""
        self._inboxes[handoff_id] = inbox
        self.row.pend_sequences(1)
        if not self.is_up:
            inbox.put_nowait(LinkLost(self.record, "the session is down"))

    def unsubscribe(self, handoff_id: HandoffId) -> None:
        if self._inboxes.pop(handoff_id, None) is not None:
            self.row.pend_sequences(-1)

    def send(self, command: SessionCommand) -> None:
        """Queue a command; dropped when the session is down (whoever waits for its answer gets LinkLost)."""
        self._outbox.put(command, command.ByteSize())

    async def run(self) -> str:
        """Until the session ends, and why it did. Then every waiting handoff learns it, once."""
        reason = "the session ended"
        events = self._open_session(self.record, self._outgoing())
        try:
            await self._converse(events)
        except TandemError as error:
            reason = str(error)
        finally:
            self._end(reason)
            await events.aclose()
        return reason

    async def _converse(self, events: AsyncGenerator[Any, None]) -> None:
        hello = pb.GatewayHello(gateway_id=self._gateway_id, fingerprint=self.record.kv_spec.fingerprint)
        self._outbox.put(self._dialect.hello(hello))
        async for message in heard_within(events):
            self.heard_s = loop_time()
            if message.HasField("load"):
                self.row.publish(convert.load_from_proto(message.load))
            for event in message.events:
                self._on_event(event)

    async def _outgoing(self) -> AsyncIterator[Any]:
        async for batch in self._outbox.batches():
            yield self._dialect.wrap(batch)

    def _on_event(self, event: SessionEvent) -> None:
        kind = event.WhichOneof("event")
        if kind is None:
            return
        body = getattr(event, kind)
        if kind == "hello":
            self._greet(body)
            return
        handoff = body.grant.handoff_id if kind == "granted" else body.handoff_id
        inbox = self._inboxes.get(convert.handoff_id_from_proto(handoff))
        if inbox is not None:
            inbox.put_nowait(FromWorker(self.record, kind, body))

    def _greet(self, hello: pb.WorkerHello) -> None:
        """Raises WorkerLost when another incarnation or model answers at that address."""
        record = self.record
        if hello.worker.epoch != record.epoch:
            raise WorkerLost(f"{record.worker_id} has restarted")
        told, registered = _sizes(hello), _sizes(convert.hello_to_proto(record))
        if told != registered:
            raise WorkerLost(f"{record.worker_id} differs from its registration: {told}, not {registered}")
        mismatch = self.record.kv_spec.mismatch(convert.kv_spec_from_proto(hello.kv_spec))
        if mismatch is not None:
            raise WorkerLost(f"{self.record.worker_id} differs from its registration: {mismatch}")
        self.up.set()
        self.row.set_up(True)
        self.was_up = True
        logger.info("session with %s open", self.record.worker_id)

    def _end(self, reason: str) -> None:
        self.up.clear()
        self.row.set_up(False)
        self._outbox.close()
        for inbox in self._inboxes.values():
            inbox.put_nowait(LinkLost(self.record, reason))


def _sizes(hello: pb.WorkerHello) -> tuple[object, ...]:
    sizes = (hello.num_blocks, hello.context_len, hello.max_batch, hello.max_local_tokens)
    return hello.worker.worker_id, *sizes
