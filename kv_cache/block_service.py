"""A worker's half of moving cached blocks: it fetches into its cache what another sends, and sends from it.

    gateway ── Fetch ──► this worker: room for what it lacks ─► grant ─► written, verified ─► cached
            ── Send ───► the other:   lent blocks ═══════════════════════════╝

A call that ends early, for whatever reason, leaves nothing: its blocks are given back once nobody touches them.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from hashlib import blake2b
from typing import Any, NoReturn, TypeAlias

import grpc

from core.block_hash import HASH_BYTES
from core.errors import TandemError
from core.grant import Grant, Seal
from core.ids import BlockHash, HandoffId
from core.logs import about_handoff
from engine.messages import Fetching
from kv_cache.disk_tier import DiskTier
from kv_cache.engine_cache import EngineCache
from kv_transfer.base import KVTransfer, runs_of
from kv_transfer.connections import Connections
from kv_transfer.connectors import scheme_of
from proto import blocks_pb2 as pb
from proto import blocks_pb2_grpc, convert

logger = logging.getLogger(__name__)
MOVE_LIMIT_S = 30.0
QUIET_POLL_S = 0.1

BLOCKS_SERVICE = pb.DESCRIPTOR.services_by_name["Blocks"].full_name
Context: TypeAlias = grpc.aio.ServicerContext


class BlockService(blocks_pb2_grpc.BlocksServicer):
    """One per worker, of either tier. Owns no block: the engine does. What only its `disk` has is sent as well."""

    def __init__(self, cache: EngineCache, connections: Connections) -> None:
        self._cache = cache
        self._connections = connections
        self.disk: DiskTier | None = None
        self._fetches: set[HandoffId] = set()
        self._ends: set[asyncio.Task[None]] = set()

    async def renew(self) -> None:
        """The connections are another incarnation's: what was on its way here ends. What was being sent ends with the
        senders."""
        await asyncio.gather(*(self._connections.receivers.cancel(fetch) for fetch in self._fetches))

    async def Fetch(self, request: pb.FetchRequest, context: Context) -> None:
        """See the proto. The blocks are the transfer's from the grant on. (Not a generator: one that is left at a
        yield ends when it is collected.)"""
        handoff_id = convert.handoff_id_from_proto(request.handoff_id)
        hashes = await self._check(request.worker.epoch, request.hashes, context)
        fetching = await self._cache.fetch(handoff_id, hashes)
        self._fetches.add(handoff_id)
        is_whole = False
        try:
            grant = self._grant(fetching)
            if fetching.block_ids:
                lacking = hashes[fetching.num_cached :][: len(fetching.block_ids)]
                self._connections.receivers.expect(grant, content_of(lacking))
            await context.write(pb.FetchEvent(grant=convert.grant_to_proto(grant)))
            if not fetching.block_ids:
                return
            seal = await self._connections.receivers.wait_sealed(handoff_id, MOVE_LIMIT_S)
            is_whole = True
            self._cache.end_fetch(handoff_id, is_whole=True)
            await context.write(pb.FetchEvent(fetched=self._fetched(grant, seal)))
        except TandemError as error:
            await _abort(context, handoff_id, grpc.StatusCode.ABORTED, str(error))
        finally:
            self._fetches.discard(handoff_id)
            if not is_whole:
                self._spawn(self._give_up(handoff_id))

    async def Send(self, request: pb.SendRequest, context: Context) -> pb.SendReply:
        """See the proto."""
        grant = convert.grant_from_proto(request.grant)
        hashes = await self._check(request.worker.epoch, request.hashes, context)
        if len(hashes) != len(grant.block_ids):
            message = f"{len(hashes)} hashes for {len(grant.block_ids)} blocks"
            await _abort(context, grant.handoff_id, grpc.StatusCode.INVALID_ARGUMENT, message)
        if self.disk is not None:
            await self.disk.prepare_blocks(hashes)
        lent = await self._cache.lend(grant.handoff_id, hashes)
        transfer: KVTransfer | None = None
        try:
            if lent.hashes != hashes:
                message = f"{len(lent.hashes)} of {len(hashes)} blocks are here"
                await _abort(context, grant.handoff_id, grpc.StatusCode.NOT_FOUND, message)
            address = self._connections.senders.choose(grant.addresses)
            transfer = await self._connections.senders.open(grant, address)
            await transfer.send(list(runs_of(lent.block_ids)))
            await transfer.seal(self._seal(grant, hashes, scheme_of(address)))
            return pb.SendReply(num_bytes=transfer.num_bytes_sent)
        except TandemError as error:
            await _abort(context, grant.handoff_id, grpc.StatusCode.ABORTED, str(error))
        finally:
            self._spawn(self._end_loan(grant.handoff_id, transfer))

    async def _check(self, epoch: int, hashes: Sequence[bytes], context: Context) -> list[BlockHash]:
        """The hashes of a request to this incarnation; any other is refused."""
        if epoch != self._connections.identity.epoch:
            message = "this worker has restarted since"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
        if not hashes or any(len(block_hash) != HASH_BYTES for block_hash in hashes):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"hashes have {HASH_BYTES} bytes")
        return [BlockHash(block_hash) for block_hash in hashes]

    def _grant(self, fetching: Fetching) -> Grant:
        block_size = self._connections.identity.spec.block_size
        num_blocks = fetching.num_cached + len(fetching.block_ids)
        return self._connections.granter.grant(
            fetching.id, num_blocks * block_size, fetching.num_cached * block_size, fetching.block_ids
        )

    def _seal(self, grant: Grant, hashes: Sequence[BlockHash], connector: str) -> Seal:
        return Seal(
            handoff_id=grant.handoff_id,
            prefill_worker_id=self._connections.identity.worker_id,
            prefill_epoch=self._connections.identity.epoch,
            decode_epoch=grant.epoch,
            num_tokens=grant.num_prompt_tokens,
            chain_hash=content_of(hashes),
            first_tokens=(),
            connector=connector,
        )

    def _fetched(self, grant: Grant, seal: Seal) -> pb.Fetched:
        spec = self._connections.identity.spec
        num_blocks = len(grant.block_ids)
        return pb.Fetched(
            num_tokens=num_blocks * spec.block_size,
            num_bytes=num_blocks * spec.block_bytes,
            connector=seal.connector,
        )

    async def _give_up(self, handoff_id: HandoffId) -> None:
        """The blocks of a fetch that did not succeed are free once nothing writes into them."""
        if not await self._connections.receivers.cancel(handoff_id):
            await self._connections.receivers.wait_quiet(handoff_id)
        self._cache.end_fetch(handoff_id, is_whole=False)

    async def _end_loan(self, handoff_id: HandoffId, transfer: KVTransfer | None) -> None:
        """The lent blocks may change once nothing reads them."""
        while transfer is not None and not await transfer.cancel():  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(QUIET_POLL_S)
        self._cache.end_loan(handoff_id)

    def _spawn(self, end: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(end)
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)


def content_of(hashes: Sequence[BlockHash]) -> BlockHash:
    """What a seal of moved blocks says that they are: both sides mean the same blocks in the same order."""
    return BlockHash(blake2b(b"".join(hashes), digest_size=HASH_BYTES).digest())


async def _abort(context: Context, handoff_id: HandoffId, code: grpc.StatusCode, message: str) -> NoReturn:
    logger.warning("blocks were not moved: %s", message, extra=about_handoff(handoff_id))
    await context.abort(code, message)
    raise AssertionError("abort() raises")
