"""A front over the rig, with the worker's events for one handoff at a time."""

import asyncio
from pathlib import Path
from typing import Any

from gateway.metrics import GatewayMetrics
from gateway.routing.orchestrator import Orchestrator
from gateway.serving import NO_TENANTS, Serving
from gateway.tenants import Tenants
from gateway.text.grammar_checker import GrammarChecker
from proto import convert
from proto import session_pb2 as pb
from proto import types_pb2 as types
from tests.gateway.peers import Rig, Worker


class Served:
    """A front's view of the rig, with the worker's events for one handoff at a time."""

    def __init__(self, rig: Rig, tokenizer: Any, model: Path, tenants: Tenants = NO_TENANTS) -> None:
        self.rig = rig
        self.metrics = GatewayMetrics(list)
        orchestrator = Orchestrator(rig.fleet, rig.prefixes, rig.rows, self.metrics)
        self.grammars = GrammarChecker(model)
        self.serving = Serving(
            "m", tokenizer, rig.fleet, orchestrator, self.metrics, self.grammars, 60.0, tenants=tenants
        )

    def outcomes(self) -> dict[str, float]:
        samples = self.metrics.requests.collect()[0].samples
        return {s.labels["outcome"]: s.value for s in samples if s.name == "tandem_requests_total"}

    async def start(self) -> pb.PrefillStart:
        """The start command, at whichever prefill worker it arrives."""
        commands = [asyncio.create_task(worker.take("start")) for worker in self.rig.prefill]
        done, waiting = await asyncio.wait(commands, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return done.pop().result()

    @property
    def num_resends(self) -> float:
        return self.metrics.resends.collect()[0].samples[0].value

    async def to_decode(self, first: str, decode: Worker | None = None) -> Worker:
        """Up to the verified seal; the decode worker."""
        start = await self.start()
        self.handoff_id = start.handoff_id
        prefill = next(w for w in self.rig.prefill if w.record.worker_id == start.worker.worker_id)
        num_output_ids = len(start.output_ids)
        prefill.emit(started=pb.PrefillStarted(handoff_id=start.handoff_id, num_output_ids=num_output_ids))
        decode = decode or self.rig.decode[0]
        await decode.take("reserve")
        decode.emit(granted=pb.DecodeGranted(grant=types.Grant(handoff_id=start.handoff_id)))
        await prefill.take("grant")
        token = types.FirstToken(token_id=ord(first), position=len(start.output_ids))
        decode.emit(seal_verified=pb.DecodeSealVerified(handoff_id=start.handoff_id, first_tokens=[token]))
        await prefill.take("release")
        self.position = len(start.output_ids)
        return decode

    def emit(self, decode: Worker, text: str, reason: str = "") -> None:
        for left, character in zip(reversed(range(len(text))), text, strict=True):
            self.position += 1
            token = pb.DecodeToken(
                handoff_id=self.handoff_id,
                position=self.position,
                token_id=ord(character),
                finish_reason=convert.FINISH_REASONS["" if left else reason],
            )
            decode.emit(token=token)
