"""The decode tier's gRPC side: sessions with gateways, handoffs with the engine process and the connectors.

Start here to follow a request through this tier: `on_command`, then `_on_event`, then `_receive`.
"""

import logging
from collections.abc import AsyncIterator
from dataclasses import replace

from cluster.block_index import BlockPublisher
from cluster.handoff_host import Entry, HandoffHost
from cluster.session import Outbox
from cluster.tracing import NO_TRACING, Tracing
from core.errors import StaleEpoch, TandemError, error_from
from core.ids import HandoffId
from core.load import Load
from decode_service.handoff import DecodeHandoff
from engine.engine_process import EngineProcess
from engine.messages import (
    AbortWork,
    Activate,
    AnyEvent,
    ClearCache,
    Credit,
    Fetching,
    Lent,
    PromptScores,
    Quiet,
    Report,
    Reserve,
    Reserved,
    Token,
    WorkAborted,
    WorkFailed,
)
from kv_cache.engine_cache import EngineCache
from kv_transfer.granting import Granter
from proto import convert, session_pb2_grpc
from proto import session_pb2 as pb

logger = logging.getLogger(__name__)
Events = Outbox[pb.DecodeEvent]
DecodeEntry = Entry[DecodeHandoff, pb.DecodeEvent]


class DecodeService(
    HandoffHost[pb.DecodeCommand, pb.DecodeEvent, DecodeHandoff], session_pb2_grpc.DecodeServicer
):
    """Between gateways, the engine process and the connectors, whose copies run in threads of their own."""

    def __init__(
        self,
        hello: pb.WorkerHello,
        engine: EngineProcess,
        granter: Granter,
        publisher: BlockPublisher,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        super().__init__(granter.epoch, tracing)
        self._hello = hello
        self._engine = engine
        self._granter = granter
        self._publisher = publisher
        self._receivers = granter.receivers
        self._block_bytes = convert.kv_spec_from_proto(hello.kv_spec).block_bytes
        self._load = Load()
        self.cache = EngineCache(engine)

    def renew(self, hello: pb.WorkerHello, granter: Granter) -> None:
        """Go on as another incarnation, with the same engine and nothing of what was there."""
        self.fence(granter.epoch)
        self._hello, self._granter = hello, granter

    @property
    def load(self) -> Load:
        """As the engine last told it."""
        return replace(self._load, is_draining=self.is_draining)

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
                self.abort(convert.handoff_id_from_proto(command.abort.handoff_id), events)
            case "clear_cache":
                logger.info("the prefix cache was cleared on request")
                self._engine.send(ClearCache())
            case unknown:
                logger.warning("ignored a command of unknown kind %s", unknown)

    def _reserve(self, reserve: pb.DecodeReserve, events: Events) -> None:
        handoff_id = convert.handoff_id_from_proto(reserve.handoff_id)
        if not self.may_start(handoff_id, reserve.worker.epoch, reserve.cache_salt, events):
            return
        handoff = DecodeHandoff(handoff_id, reserve.deadline_s, self._receivers)
        entry = self.admit(handoff, events, reserve.deadline_s, reserve.trace_parent)
        entry.trace.begin("decode.run" if reserve.is_local else "decode.reserve")
        params = convert.sampling_from_proto(reserve.sampling)
        prompt, output = list(reserve.prompt_ids), list(reserve.output_ids)
        self._engine.send(
            Reserve(
                handoff_id,
                prompt,
                output,
                params,
                reserve.wait_s,
                reserve.credit,
                reserve.is_local,
                reserve.cache_salt,
            )
        )

    async def _receive(self, entry: DecodeEntry) -> None:
        """Blocks arrive, the seal proves them, decoding starts: no earlier."""
        handoff = entry.handoff
        try:
            seal = await handoff.receive()
        except TandemError as error:
            self.fail(entry, error)
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
        entry.trace.end(
            "decode.receive", {"tandem.num_bytes": verified.num_bytes, "tandem.connector": seal.connector}
        )
        entry.trace.begin("decode.run")
        entry.events.put(pb.DecodeEvent(seal_verified=verified))

    async def end_work(self, entry: DecodeEntry) -> None:
        """Blocks whose writer could not be shown quiet are quarantined until it is."""
        self._engine.send(AbortWork(entry.handoff.id, entry.is_quiet))
        if not entry.is_quiet:
            await self._receivers.wait_quiet(entry.handoff.id)
            self._engine.send(Quiet(entry.handoff.id))

    async def follow_engine(self) -> None:
        """Pass on the engine's reports until it is gone."""
        async for report in self._engine.reports():
            self._on_report(report)

    def _on_report(self, report: Report) -> None:
        if report.load is not None:
            self._load = report.load
        for is_stored, block_hash in report.cache_changes:
            self._publisher.note(is_stored, block_hash)
        for event in report.events:
            if isinstance(event, Fetching | Lent):
                self.cache.on_event(event)
            elif (entry := self.find(event.id)) is not None:
                self._on_event(event, entry)

    def _on_event(self, event: AnyEvent, entry: DecodeEntry) -> None:
        match event:
            case Reserved():
                self._granted(event, entry)
            case Token():
                entry.events.put(_token(event))
                if event.finish_reason and entry.ending is None:  # else its abort is answered
                    entry.handoff.finish()
                    entry.trace.end("decode.run", {"tandem.num_tokens": event.position + 1})
                    self.forget(event.id)
            case PromptScores():
                scores = convert.scores_to_proto(event.id, event.position, event.scores)
                entry.events.put(pb.DecodeEvent(prompt_scores=scores))
            case WorkFailed():
                self.fail(entry, error_from(event.code, event.message, event.field))
            case WorkAborted():
                self.ended(event.id)

    def _granted(self, reserved: Reserved, entry: DecodeEntry) -> None:
        if entry.ending is not None:
            return
        grant = self._granter.grant(
            reserved.id, reserved.num_tokens, reserved.num_cached_tokens, reserved.block_ids
        )
        try:
            self._receivers.expect(grant, reserved.chain_hash)
        except StaleEpoch as error:
            self.fail(entry, error)
            return
        entry.handoff.granted(grant)
        entry.trace.end("decode.reserve")
        entry.trace.begin("decode.receive")
        entry.task = self.spawn(self._receive(entry), entry.handoff.id.request_id)
        entry.events.put(pb.DecodeEvent(granted=pb.DecodeGranted(grant=convert.grant_to_proto(grant))))

    def failed(self, handoff_id: HandoffId, error: TandemError) -> pb.DecodeEvent:
        return pb.DecodeEvent(failed=convert.failed_to_proto(handoff_id, error))

    def aborted(self, handoff_id: HandoffId, is_quiet: bool) -> pb.DecodeEvent:
        return pb.DecodeEvent(aborted=convert.aborted_to_proto(handoff_id, is_quiet))


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
        top=convert.top_to_proto(event.top),
        num_cached_tokens=event.num_cached_tokens if event.position == 0 else 0,
    )
    return pb.DecodeEvent(token=token)
