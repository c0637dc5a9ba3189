"""Blocks moved between two workers' caches: real gRPC, real connectors, real pools; only nothing is computed."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from core.ids import BlockHash, Epoch, HandoffId, RequestId
from engine.block_pool import BlockState
from kv_cache.disk_store import DiskStore
from kv_cache.disk_tier import DiskTier
from kv_transfer.base import Identity
from kv_transfer.faults import Faults
from proto import blocks_pb2 as pb
from proto import convert
from tests.kv_cache.rig import CHAIN, NUM_BLOCKS, SPEC, Worker, content


def _fetch(worker: Worker, number: int, hashes: Sequence[BlockHash], epoch: int | None = None) -> Any:
    handoff_id = convert.handoff_id_to_proto(HandoffId(RequestId("move"), number))
    identity = convert.identity_to_proto(worker.identity.worker_id, Epoch(epoch or worker.identity.epoch))
    return worker.stub.Fetch(pb.FetchRequest(handoff_id=handoff_id, worker=identity, hashes=hashes))


def _send(worker: Worker, grant: Any, hashes: Sequence[BlockHash]) -> Any:
    identity = convert.identity_to_proto(worker.identity.worker_id, worker.identity.epoch)
    return worker.stub.Send(pb.SendRequest(grant=grant, worker=identity, hashes=hashes))


async def _move(source: Worker, target: Worker, hashes: Sequence[BlockHash], number: int = 1) -> Any:
    """All of it, as a gateway does; what the fetching worker said."""
    call = _fetch(target, number, hashes)
    try:
        granted = (await call.read()).grant
        first = granted.num_cached_tokens // SPEC.block_size
        await _send(source, granted, hashes[first : first + len(granted.block_ids)])
        return (await call.read()).fetched
    finally:
        call.cancel()


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[tuple[Worker, Worker]]:
    source, target = Worker("source"), Worker("the target")
    await source.start()
    await target.start()
    yield source, target
    for worker in (source, target):
        await worker.wait_idle()
        await worker.close()


async def test_what_one_worker_has_another_gets(pair: tuple[Worker, Worker]):
    source, target = pair
    source.hold(CHAIN[:10])
    fetched = await _move(source, target, CHAIN[:10])
    assert (fetched.num_tokens, fetched.num_bytes) == (160, 10 * SPEC.block_bytes)
    assert fetched.connector == "tcp"
    await target.wait_idle()
    target.check(10)
    source.check(10)


async def test_only_what_is_lacking_crosses(pair: tuple[Worker, Worker]):
    source, target = pair
    source.hold(CHAIN[:10])
    target.hold(CHAIN[:4])
    fetched = await _move(source, target, CHAIN[:10])
    assert fetched.num_tokens == 6 * SPEC.block_size
    await target.wait_idle()
    target.check(10)


async def test_what_only_the_disk_of_a_worker_has_is_sent_as_well(
    pair: tuple[Worker, Worker], tmp_path: Path
):
    source, target = pair
    store = DiskStore(tmp_path, "model", SPEC.block_bytes, 1 << 20)
    for block_hash in CHAIN[:10]:
        store.put(block_hash, memoryview(content(block_hash)))
    told: set[BlockHash] = set()
    disk = DiskTier(store, source.region, SPEC, source.cache, lambda _, block_hash: told.add(block_hash))
    source.service.disk = disk
    assert told == set(CHAIN[:10]), "they count as held"
    target.hold(CHAIN[:4])
    fetched = await _move(source, target, CHAIN[:10])
    assert fetched.num_tokens == 6 * SPEC.block_size
    await target.wait_idle()
    target.check(10)
    await source.wait_idle()
    await disk.close(1.0)


async def test_nothing_is_granted_for_what_is_there_or_finds_no_room(pair: tuple[Worker, Worker]):
    _, target = pair
    target.hold(CHAIN[:4])
    assert not (await _fetch(target, 1, CHAIN[:4]).read()).grant.block_ids
    blocks = target.pool.allocate(NUM_BLOCKS)
    assert blocks is not None
    assert not (await _fetch(target, 2, CHAIN[:9]).read()).grant.block_ids
    target.pool.release(blocks)


async def test_a_source_that_lacks_a_block_says_so_and_nothing_stays_held(pair: tuple[Worker, Worker]):
    source, target = pair
    source.hold(CHAIN[:3])
    call = _fetch(target, 1, CHAIN[:5])
    granted = (await call.read()).grant
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await _send(source, granted, CHAIN[:5])
    assert failure.value.code() is grpc.StatusCode.NOT_FOUND
    call.cancel()
    await target.wait_idle()
    target.check(0)
    assert target.pool.counts[BlockState.FREE] == NUM_BLOCKS


async def test_blocks_in_another_order_than_was_asked_for_are_refused(pair: tuple[Worker, Worker]):
    source, target = pair
    source.hold(CHAIN[:4])
    call = _fetch(target, 1, CHAIN[:4])
    granted = (await call.read()).grant
    await _send(source, granted, [*CHAIN[1:4], CHAIN[0]])
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call.read()
    assert "chain hash" in str(failure.value.details())
    await target.wait_idle()
    target.check(0)


async def test_another_incarnation_and_nonsense_are_refused(pair: tuple[Worker, Worker]):
    _, target = pair
    for call, code in (
        (_fetch(target, 1, CHAIN[:4], epoch=99), grpc.StatusCode.FAILED_PRECONDITION),
        (_fetch(target, 2, []), grpc.StatusCode.INVALID_ARGUMENT),
        (_fetch(target, 3, [BlockHash(b"short")]), grpc.StatusCode.INVALID_ARGUMENT),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call.read()
        assert failure.value.code() is code
    assert target.pool.counts[BlockState.FREE] == NUM_BLOCKS


async def test_callers_that_go_at_any_moment_leave_nothing_held(pair: tuple[Worker, Worker]):
    source, target = pair
    source.hold(CHAIN[:8])
    for number in range(12):
        moving = asyncio.create_task(_move(source, target, CHAIN[: 1 + number % 8], number + 1))
        await asyncio.sleep(number * 0.001)
        moving.cancel()
        await asyncio.wait([moving])
        await source.wait_idle()
    await target.wait_idle()
    target.check(len(target.pool.lookup(CHAIN)))


async def test_a_new_incarnation_has_ended_what_was_on_its_way(pair: tuple[Worker, Worker]):
    _, target = pair
    call = _fetch(target, 1, CHAIN[:8])
    assert len((await call.read()).grant.block_ids) == 8
    await target.connections.renew(Identity(target.identity.worker_id, Epoch(77), SPEC)).close()
    await target.service.renew()
    await target.wait_idle()
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()


@pytest.mark.parametrize("faults", [Faults(corrupts=True), Faults(drops_run=True), Faults(drops_seal=True)])
async def test_what_arrives_wrong_or_in_part_is_never_cached(faults: Faults):
    source, target = Worker("source", faults), Worker("the target")
    await source.start()
    await target.start()
    source.hold(CHAIN[:8])
    try:
        async with asyncio.timeout(10):
            call = _fetch(target, 1, CHAIN[:8])
            granted = (await call.read()).grant
            sending = asyncio.create_task(_await(_send(source, granted, CHAIN[:8])))
            await asyncio.sleep(0.3)
            if faults.drops_seal:
                call.cancel()  # as whoever asked does in the end
            else:
                with pytest.raises(grpc.aio.AioRpcError):
                    await call.read()
            await asyncio.wait([sending])
        await target.wait_idle()
        target.check(0)
    finally:
        for worker in (source, target):
            await worker.close()


async def _await(call: Any) -> None:
    await call
