"""The prefill tier's gRPC side: sessions with gateways, handoffs with the engine process and the connectors.

Start here to follow a request through this tier: `on_command`, then `_on_event`, then `_deliver`.
"""

import logging
from collections.abc import AsyncIterator
from dataclasses import replace

from cluster.block_index import BlockPublisher
from cluster.handoff_host import Entry, HandoffHost
from cluster.session import Outbox
from cluster.tracing import NO_TRACING, Tracing
from core.errors import StaleEpoch, TandemError, error_from
from core.grant import Grant
from core.handoff import HandoffState
from core.ids import HandoffId
from core.load import Load
from core.logs import about_handoff
from engine.engine_process import EngineProcess
from engine.messages import (
    AbortWork,
    AnyEvent,
    ClearCache,
    Computed,
    Fetching,
    First,
    Granted,
    Lent,
    PromptScores,
    Release,
    Report,
    Started,
    StartPrompt,
    WorkAborted,
    WorkFailed,
)
from kv_cache.disk_tier import DiskTier
from kv_cache.engine_cache import EngineCache
from kv_transfer.base import Identity
from kv_transfer.connectors import SenderSet
from kv_transfer.faults import FaultySender
from prefill_service.handoff import PrefillHandoff
from prefill_service.sent import SentCounts
from proto import convert, session_pb2_grpc
from proto import session_pb2 as pb

logger = logging.getLogger(__name__)
Events = Outbox[pb.PrefillEvent]
PrefillEntry = Entry[PrefillHandoff, pb.PrefillEvent]


class PrefillService(
    HandoffHost[pb.PrefillCommand, pb.PrefillEvent, PrefillHandoff], session_pb2_grpc.PrefillServicer
):
    """Between gateways, the engine process and the connectors, whose copies run in threads of their own."""

    def __init__(
        self,
        hello: pb.WorkerHello,
        identity: Identity,
        engine: EngineProcess,
        senders: SenderSet | FaultySender,
        publisher: BlockPublisher,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        super().__init__(identity.epoch, tracing)
        self._sent = SentCounts()
        self._hello = hello
        self._identity = identity
        self._publisher = publisher
        self._engine = engine
        self.senders = senders
        self._load = Load()
        self.cache = EngineCache(engine)
        self.disk: DiskTier | None = None

    def renew(self, hello: pb.WorkerHello, identity: Identity, senders: SenderSet | FaultySender) -> None:
        """Go on as another incarnation, with the same engine and nothing of what was there."""
        self.fence(identity.epoch)
        self._hello, self._identity, self.senders = hello, identity, senders

    @property
    def load(self) -> Load:
        """As the engine last told it, with what the transfers carried."""
        disk = self.disk.counts if self.disk is not None else None
        counts = replace(self._load.counts, sent=self._sent.read(), disk=disk)
        return replace(self._load, is_draining=self.is_draining, counts=counts)

    async def Session(
        self, requests: AsyncIterator[pb.PrefillCommands], context: object
    ) -> AsyncIterator[pb.PrefillEvents]:
        """One gateway's session: its end, for whatever reason, aborts exactly its own handoffs."""
        async for batch in self.serve(pb.PrefillEvent(hello=self._hello), _commands(requests)):
            yield pb.PrefillEvents(events=batch, load=convert.load_to_proto(self.load))

    def on_command(self, command: pb.PrefillCommand, events: Events) -> None:
        match command.WhichOneof("command"):
            case "hello":
                logger.info("gateway %s connected", command.hello.gateway_id)
            case "start":
                self._start(command.start, events)
            case "grant":
                self._grant(convert.grant_from_proto(command.grant.grant), events)
            case "release":
                self._release(convert.handoff_id_from_proto(command.release.handoff_id))
            case "abort":
                self.abort(convert.handoff_id_from_proto(command.abort.handoff_id), events)
            case "clear_cache":
                logger.info("the prefix cache was cleared on request")
                self._engine.send(ClearCache())
                if self.disk is not None:
                    self.disk.clear()
            case unknown:
                logger.warning("ignored a command of unknown kind %s", unknown)

    def _start(self, start: pb.PrefillStart, events: Events) -> None:
        handoff_id = convert.handoff_id_from_proto(start.handoff_id)
        if not self.may_start(handoff_id, start.worker.epoch, start.cache_salt, events):
            return
        block_size = self._hello.kv_spec.block_size
        handoff = PrefillHandoff(handoff_id, len(start.prompt_ids), len(start.output_ids), block_size)
        entry = self.admit(handoff, events, start.deadline_s, start.trace_parent)
        entry.trace.begin("prefill.queue")
        takes_over = start.takes_over if self._retire(handoff_id, start.takes_over) else 0
        params = convert.sampling_from_proto(start.sampling)
        prompt, output = list(start.prompt_ids), list(start.output_ids)
        command = StartPrompt(handoff_id, prompt, output, params, takes_over, start.cache_salt)
        if self.disk is None or takes_over:
            self._engine.send(command)
        else:
            prepared = self._start_prepared(self.disk, command)
            entry.task = self.spawn(prepared, handoff_id.request_id)
        events.put(pb.PrefillEvent(queued=pb.PrefillQueued(handoff_id=start.handoff_id)))

    async def _start_prepared(self, disk: DiskTier, command: StartPrompt) -> None:
        """Once what the disk has of the prompt is cached, as far as it will be."""
        await disk.prepare([*command.prompt_ids, *command.output_ids], command.cache_salt)
        self._engine.send(command)

    def _retire(self, handoff_id: HandoffId, attempt: int) -> bool:
        """End an earlier attempt but for its blocks, which the engine passes to the new one. What its transfer may
        still read there is never sealed, so it need not be waited for. False when it is not live here."""
        entry = self.find(HandoffId(handoff_id.request_id, attempt))
        if not attempt or entry is None or entry.ending is not None:
            return False
        self.forget(entry.handoff.id)
        self.spawn(self._end_retired(entry), handoff_id.request_id)
        return True

    async def _end_retired(self, entry: PrefillEntry) -> None:
        await self.stop_transfer(entry)
        entry.handoff.lifetime.end(HandoffState.ABORTED)

    def _grant(self, grant: Grant, events: Events) -> None:
        """The first grant of a handoff starts its transfer; there is no second one."""
        entry = self.find(grant.handoff_id)
        if entry is None:
            events.put(self.failed(grant.handoff_id, StaleEpoch("no such handoff here")))
        elif entry.handoff.lifetime.state is HandoffState.PENDING and entry.ending is None:
            entry.handoff.lifetime.advance(HandoffState.GRANTED)
            self._engine.send(Granted(grant.handoff_id))
            entry.task = self.spawn(self._deliver(entry, grant), grant.handoff_id.request_id)

    async def _deliver(self, entry: PrefillEntry, grant: Grant) -> None:
        """Blocks cross while later ones are computed; the seal goes last. A transfer that failed leaves the lease:
        the gateway has the blocks sent elsewhere, or aborts."""
        handoff_id = convert.handoff_id_to_proto(entry.handoff.id)
        try:
            entry.trace.begin("prefill.send")
            delivered = await entry.handoff.deliver(grant, self.senders, self._identity)
        except TandemError as error:
            logger.warning("transfer failed: %s", error, extra=about_handoff(entry.handoff.id))
            entry.trace.close(str(error))
            entry.handoff.lifetime.end(HandoffState.FAILED)
            await entry.handoff.cancel()
            entry.events.put(self.failed(entry.handoff.id, error))
            return
        finally:
            self._sent.note(entry.handoff)
        if delivered is None:
            return
        entry.trace.end(
            "prefill.send",
            {"tandem.num_bytes": delivered.num_bytes, "tandem.connector": delivered.connector},
        )
        sealed = pb.PrefillSealed(
            handoff_id=handoff_id, num_bytes=delivered.num_bytes, connector=delivered.connector
        )
        entry.events.put(pb.PrefillEvent(sealed=sealed))

    def _release(self, handoff_id: HandoffId) -> None:
        """The seal was verified: nothing of this handoff is needed here any more."""
        entry = self.find(handoff_id)
        if entry is not None and entry.ending is None:
            self.forget(handoff_id)
            entry.handoff.released()
            self._engine.send(Release(handoff_id))

    async def end_work(self, entry: PrefillEntry) -> None:
        self._engine.send(AbortWork(entry.handoff.id))

    async def follow_engine(self) -> None:
        """Pass on the engine's reports until it is gone."""
        async for report in self._engine.reports():
            self._on_report(report)

    def _on_report(self, report: Report) -> None:
        if report.load is not None:
            self._load = report.load
        note = self._publisher.note if self.disk is None else self.disk.on_cache_change
        for is_stored, block_hash in report.cache_changes:
            note(is_stored, block_hash)
        for event in report.events:
            if isinstance(event, Fetching | Lent):
                self.cache.on_event(event)
            elif (entry := self.find(event.id)) is not None:
                self._on_event(event, entry)

    def _on_event(self, event: AnyEvent, entry: PrefillEntry) -> None:
        handoff_id = convert.handoff_id_to_proto(event.id)
        match event:
            case Started():
                entry.handoff.started(event.block_ids, event.num_cached_tokens, event.num_tokens)
                entry.trace.end("prefill.queue")
                entry.trace.begin("prefill.compute")
                started = pb.PrefillStarted(
                    handoff_id=handoff_id,
                    num_cached_tokens=event.num_cached_tokens,
                    num_output_ids=event.num_tokens - entry.handoff.num_prompt_tokens,
                )
                entry.events.put(pb.PrefillEvent(started=started))
            case Computed():
                entry.handoff.computed(event.num_tokens)
            case First():
                entry.handoff.sampled(event)
                entry.trace.end("prefill.compute", {"tandem.num_tokens": entry.handoff.num_tokens})
                pairs = zip(event.first_tokens, event.finish_reasons, strict=True)
                tokens = [convert.first_token_to_proto(token, reason) for token, reason in pairs]
                first = pb.PrefillFirstToken(handoff_id=handoff_id, first_tokens=tokens)
                entry.events.put(pb.PrefillEvent(first_token=first))
            case PromptScores():
                scores = convert.scores_to_proto(event.id, event.position, event.scores)
                entry.events.put(pb.PrefillEvent(prompt_scores=scores))
            case WorkFailed():
                self.fail(entry, error_from(event.code, event.message, event.field))
            case WorkAborted():
                self.ended(event.id)

    def failed(self, handoff_id: HandoffId, error: TandemError) -> pb.PrefillEvent:
        return pb.PrefillEvent(failed=convert.failed_to_proto(handoff_id, error))

    def aborted(self, handoff_id: HandoffId, is_quiet: bool) -> pb.PrefillEvent:
        return pb.PrefillEvent(aborted=convert.aborted_to_proto(handoff_id, is_quiet))


async def _commands(requests: AsyncIterator[pb.PrefillCommands]) -> AsyncIterator[pb.PrefillCommand | None]:
    async for message in requests:
        yield None
        for command in message.commands:
            yield command
