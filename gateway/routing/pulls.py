"""Prefixes that are moved to where a prompt is to be computed, instead of being computed again.

    gateway ── Fetch ──► target: room for what it lacks ─► grant
            ── Send(grant) ──► source ═══ blocks ═══► target ─► cached
            ── start the prompt ──► target, which finds them

A pull is a hint like the index: whatever goes wrong, the prompt is computed, and that is counted. Prompts that share
what is on its way to their worker wait for it.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import grpc
from prometheus_client import Counter, Histogram

from core.block_hash import pool_chain
from core.clock import loop_time
from core.ids import BlockHash, Epoch, HandoffId, RequestId
from core.logs import about_handoff
from core.worker import WorkerRecord
from gateway.generation import GenerationRequest
from gateway.routing.router import Pull
from proto import blocks_pb2 as pb
from proto import blocks_pb2_grpc, convert
from proto import types_pb2 as types

logger = logging.getLogger(__name__)
PULL_LIMIT_S = 3.0
MAX_PULLS = 64

PULLS = Counter(
    "tandem_prefix_pulls", "Prefixes to be moved to another worker, by what became of it.", ["outcome"]
)
PULLED = Counter("tandem_prefix_pulled_tokens", "Prompt tokens whose KV was moved instead of computed.")
PULLED_BYTES = Counter(
    "tandem_prefix_pulled_bytes", "KV bytes that pulls moved, without framing.", ["connector"]
)

PULL_S = Histogram("tandem_prefix_pull_seconds", "How long pulls took that moved something.")


class Moving(NamedTuple):
    """What is on its way to one worker: the last block of it, and the task that ends with it."""

    last: BlockHash
    task: "asyncio.Task[bool]"


class Pulls:
    """One per gateway. Owns what is on its way: `close()`."""

    def __init__(self) -> None:
        self._moving: dict[Epoch, list[Moving]] = {}

    def is_moving(self, target: WorkerRecord) -> bool:
        """Whether anything is on its way there."""
        return target.epoch in self._moving

    async def settle(
        self, target: WorkerRecord, handoff_id: HandoffId, request: GenerationRequest, pull: Pull | None
    ) -> bool:
        """Returns when what the target will have of the prompt is there, or will not be: what others are having moved
        there, or else what `pull` names, for that attempt. False when something was to be moved and was not."""
        chain = pool_chain(request.chain, target.kv_spec.block_size)
        tasks = [moving.task for moving in self._moving.get(target.epoch, ()) if moving.last in chain]
        if not tasks and pull is not None:
            hashes = chain[: pull.num_tokens // target.kv_spec.block_size]
            tasks = [self._begin(target, handoff_id, pull.source, hashes)]
        return all(await asyncio.gather(*map(asyncio.shield, tasks)))

    async def close(self) -> None:
        for moving in [moving for several in self._moving.values() for moving in several]:
            moving.task.cancel()
            await asyncio.wait([moving.task])

    def _begin(
        self, target: WorkerRecord, handoff_id: HandoffId, source: WorkerRecord, hashes: Sequence[BlockHash]
    ) -> "asyncio.Task[bool]":
        task = asyncio.create_task(self._pull(target, handoff_id, source, hashes))
        several = self._moving.setdefault(target.epoch, [])
        moving = Moving(hashes[-1], task)
        several.append(moving)

        def end(_: object) -> None:
            several.remove(moving)
            if not several:
                self._moving.pop(target.epoch, None)

        task.add_done_callback(end)
        return task

    async def _pull(
        self, target: WorkerRecord, handoff_id: HandoffId, source: WorkerRecord, hashes: Sequence[BlockHash]
    ) -> bool:
        """Whether the target has got what it lacked. Never raises but for being cancelled."""
        move = HandoffId(RequestId(f"{handoff_id.request_id}.pull"), handoff_id.attempt)
        if sum(map(len, self._moving.values())) > MAX_PULLS:
            PULLS.labels(outcome="too_many").inc()
            return False
        began_s = loop_time()
        try:
            async with asyncio.timeout(PULL_LIMIT_S):
                fetched = await self._move(move, target, source, hashes)
        except TimeoutError:
            outcome, told = "too_slow", f"not done within {PULL_LIMIT_S:g} s"
        except grpc.aio.AioRpcError as error:
            outcome, told = error.code().name.lower(), error.details() or ""
        else:
            PULLS.labels(outcome="moved" if fetched else "not_needed").inc()
            if fetched:
                PULL_S.observe(loop_time() - began_s)
                PULLED.inc(fetched.num_tokens)
                PULLED_BYTES.labels(connector=fetched.connector).inc(fetched.num_bytes)
            return True
        PULLS.labels(outcome=outcome).inc()
        names = f"{source.worker_id} to {target.worker_id}"
        logger.warning("prefix was not moved from %s: %s", names, told, extra=about_handoff(move))
        return False

    async def _move(
        self, move: HandoffId, target: WorkerRecord, source: WorkerRecord, hashes: Sequence[BlockHash]
    ) -> pb.Fetched | None:
        """None when the target lacked nothing, or had no room."""
        request = pb.FetchRequest(
            handoff_id=convert.handoff_id_to_proto(move),
            worker=convert.identity_to_proto(*target.key),
            hashes=hashes,
        )
        async with _connected(target) as stub:
            call = stub.Fetch(request)
            try:
                grant = (await _next(call)).grant
                if not grant.block_ids:
                    return None
                await _send(source, grant, hashes, target.kv_spec.block_size)
                return (await _next(call)).fetched
            finally:
                call.cancel()


async def _send(
    source: WorkerRecord, grant: types.Grant, hashes: Sequence[BlockHash], block_size: int
) -> None:
    first = grant.num_cached_tokens // block_size
    request = pb.SendRequest(
        grant=grant,
        worker=convert.identity_to_proto(*source.key),
        hashes=hashes[first : first + len(grant.block_ids)],
    )
    async with _connected(source) as stub:
        await stub.Send(request)


@contextlib.asynccontextmanager
async def _connected(record: WorkerRecord) -> AsyncIterator[Any]:
    """A connection for one call: it costs little beside what it moves, and leaves nothing of workers that go."""
    async with grpc.aio.insecure_channel(record.address) as channel:
        yield blocks_pb2_grpc.BlocksStub(channel)


async def _next(call: Any) -> pb.FetchEvent:
    """Its next event. Raises AioRpcError when there is none."""
    event: pb.FetchEvent = await call.read()
    if event is grpc.aio.EOF:
        metadata = await call.initial_metadata(), await call.trailing_metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.ABORTED, *metadata, "it ended")
    return event
