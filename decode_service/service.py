"""The decode tier's gRPC side: sessions with gateways, handoffs with the engine process and the connectors.

Start here to follow a request through this tier: `on_command`, then `_on_event`, then `_receive`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator

from cluster.block_index import BlockPublisher
from cluster.session import Outbox, SessionHost
from core.errors import Cancelled, StaleEpoch, TandemError, error_from
from core.ids import HandoffId
from core.load import Load
from core.tombstones import Tombstones
from decode_service.handoff import DecodeHandoff, Granter
from engine.engine_process import EngineProcess
from engine.messages import (
    AbortWork,
    Activate,
    AnyEvent,
    Credit,
    Quiet,
    Report,
    Reserve,
    Reserved,
    Token,
    WorkAborted,
    WorkFailed,
)
from proto import convert, session_pb2_grpc
from proto import session_pb2 as pb

logger = logging.getLogger(__name__)
TOMBSTONE_S = 600.0
Events = Outbox[pb.DecodeEvent]


class _Entry:
    """One live handoff of one session."""

    __slots__ = ("ending", "events", "handoff", "is_quiet", "task")

    def __init__(self, handoff: DecodeHandoff, events: Events) -> None:
        self.handoff = handoff
        self.events = events
        self.task: asyncio.Task[None] | None = None
        self.ending: asyncio.Task[None] | None = None
        self.is_quiet = True


class DecodeService(SessionHost[pb.DecodeCommand, pb.DecodeEvent], session_pb2_grpc.DecodeServicer):
    """Owns the handoff table. Everything runs on one event loop; copies run in the connectors' threads."""

    def __init__(
        self, hello: pb.WorkerHello, engine: EngineProcess, granter: Granter, publisher: BlockPublisher
    ) -> None:
        super().__init__()
        self._hello = hello
        self._engine = engine
        self._granter = granter
        self._publisher = publisher
        self._receivers = granter.receivers
        self._block_bytes = convert.kv_spec_from_proto(hello.kv_spec).block_bytes
        self._entries: dict[HandoffId, _Entry] = {}
        self._over = Tombstones(TOMBSTONE_S)
        self.load = Load()

    @property
    def num_handoffs(self) -> int:
        return len(self._entries)

    async def Session(
        self, requests: AsyncIterator[pb.DecodeCommands], context: object
    ) -> AsyncIterator[pb.DecodeEvents]:
        """One gateway's session: its end, for whatever reason, aborts exactly its own handoffs."""
        async for batch in self.serve(pb.DecodeEvent(hello=self._hello), _commands(requests)):
            yield pb.DecodeEvents(events=batch, load=convert.load_to_proto(self.load))

    def on_command(self, command: pb.DecodeCommand, events: Events) -> None:
        match command.WhichOneof("command"):
            case "hello":
                logger.info("gateway %s connected", command.hello.gateway_id)
            case "reserve":
                self._reserve(command.reserve, events)
            case "credit":
                handoff_id = convert.handoff_id_from_proto(command.credit.handoff_id)
                self._engine.send(Credit(handoff_id, command.credit.num_tokens))
            case "abort":
                self._abort(convert.handoff_id_from_proto(command.abort.handoff_id), events)
            case unknown:
                logger.warning("ignored a command of unknown kind %s", unknown)

    def _reserve(self, reserve: pb.DecodeReserve, events: Events) -> None:
        handoff_id = convert.handoff_id_from_proto(reserve.handoff_id)
        if reserve.worker.epoch != self._hello.worker.epoch:
            self._put_failed(handoff_id, StaleEpoch("this worker has restarted since"), events)
        elif handoff_id in self._over:
            self._put_failed(handoff_id, Cancelled("aborted before it was reserved"), events)
        elif handoff_id not in self._entries:
            self._entries[handoff_id] = _Entry(DecodeHandoff(handoff_id, reserve.deadline_s), events)
            params = convert.sampling_from_proto(reserve.sampling)
            prompt, output = list(reserve.prompt_ids), list(reserve.output_ids)
            self._engine.send(
                Reserve(handoff_id, prompt, output, params, reserve.wait_s, reserve.credit, reserve.is_local)
            )

    async def _receive(self, entry: _Entry) -> None:
        """Blocks arrive, the seal proves them, decoding starts: no earlier."""
        handoff = entry.handoff
        try:
            seal = await handoff.receive(self._receivers)
        except TandemError as error:
            self._fail(entry, error)
            return
        self._engine.send(Activate(handoff.id, list(seal.first_tokens)))
        tokens = [convert.first_token_to_proto(token) for token in seal.first_tokens]
        handoff_id = convert.handoff_id_to_proto(handoff.id)
        verified = pb.DecodeSealVerified(
            handoff_id=handoff_id,
            first_tokens=tokens,
            num_bytes=handoff.num_blocks * self._block_bytes,
            connector=seal.connector,
        )
        entry.events.put(pb.DecodeEvent(seal_verified=verified))

    def _abort(self, handoff_id: HandoffId, events: Events) -> None:
        self._over.add(handoff_id)
        entry = self._entries.get(handoff_id)
        if entry is None:
            events.put(_aborted(handoff_id, is_quiet=True))
        elif entry.ending is None:
            entry.ending = self.spawn(self._end(entry))

    async def _end(self, entry: _Entry) -> None:
        """Stop the writers before the blocks they write are given back; quarantine those that cannot be stopped."""
        if entry.task is not None:
            entry.task.cancel()
            await asyncio.wait([entry.task])
        entry.is_quiet = await entry.handoff.cancel(self._receivers)
        self._engine.send(AbortWork(entry.handoff.id, entry.is_quiet))
        if not entry.is_quiet:
            await self._receivers.wait_quiet(entry.handoff.id)
            self._engine.send(Quiet(entry.handoff.id))

    def _fail(self, entry: _Entry, error: TandemError) -> None:
        logger.warning("handoff %s failed: %s", entry.handoff.id, error)
        self._put_failed(entry.handoff.id, error, entry.events)
        self._over.add(entry.handoff.id)
        entry.task = None
        if entry.ending is None:
            entry.ending = self.spawn(self._end(entry))

    def on_session_end(self, events: Events) -> None:
        for handoff_id in [key for key, entry in self._entries.items() if entry.events is events]:
            self._abort(handoff_id, events)

    async def follow_engine(self) -> None:
        """Pass on the engine's reports until it is gone."""
        async for report in self._engine.reports():
            self._on_report(report)

    def _on_report(self, report: Report) -> None:
        if report.load is not None:
            self.load = report.load
        for is_stored, block_hash in report.cache_changes:
            self._publisher.note(is_stored, block_hash)
        for event in report.events:
            entry = self._entries.get(event.id)
            if entry is not None:
                self._on_event(event, entry)

    def _on_event(self, event: AnyEvent, entry: _Entry) -> None:
        match event:
            case Reserved():
                self._granted(event, entry)
            case Token():
                entry.events.put(_token(event))
                if event.finish_reason:
                    entry.handoff.finish()
                    self._forget(event.id)
            case WorkFailed():
                self._forget(event.id)
                self._put_failed(event.id, error_from(event.code, event.message), entry.events)
            case WorkAborted():
                self._forget(event.id)
                entry.events.put(_aborted(event.id, entry.is_quiet))

    def _granted(self, reserved: Reserved, entry: _Entry) -> None:
        if entry.ending is not None:
            return
        grant = self._granter.grant(reserved)
        self._receivers.expect(grant, reserved.chain_hash)
        entry.handoff.grant = grant
        entry.task = self.spawn(self._receive(entry))
        entry.events.put(pb.DecodeEvent(granted=pb.DecodeGranted(grant=convert.grant_to_proto(grant))))

    def _forget(self, handoff_id: HandoffId) -> None:
        del self._entries[handoff_id]
        self._over.add(handoff_id)

    def _put_failed(self, handoff_id: HandoffId, error: TandemError, events: Events) -> None:
        failed = pb.Failed(
            handoff_id=convert.handoff_id_to_proto(handoff_id), error=convert.error_to_proto(error)
        )
        events.put(pb.DecodeEvent(failed=failed))


async def _commands(requests: AsyncIterator[pb.DecodeCommands]) -> AsyncIterator[pb.DecodeCommand | None]:
    async for message in requests:
        yield None
        for command in message.commands:
            yield command


def _token(event: Token) -> pb.DecodeEvent:
    token = pb.DecodeToken(
        handoff_id=convert.handoff_id_to_proto(event.id),
        choice=event.choice,
        position=event.position,
        token_id=event.token_id,
        logprob=event.logprob,
        finish_reason=convert.FINISH_REASONS[event.finish_reason],
        queue_s=event.queue_s,
        num_preemptions=event.num_preemptions,
    )
    return pb.DecodeEvent(token=token)


def _aborted(handoff_id: HandoffId, is_quiet: bool) -> pb.DecodeEvent:
    aborted = pb.Aborted(handoff_id=convert.handoff_id_to_proto(handoff_id), is_quiet=is_quiet)
    return pb.DecodeEvent(aborted=aborted)
