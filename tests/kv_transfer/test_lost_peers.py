"""Peers that die, stop or do not fit, on every connector; and what is left behind."""

import asyncio
import contextlib
import gc
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from core.errors import Cancelled, TransferFailed
from core.grant import Grant, Seal
from core.ids import BlockHash, BlockId, Epoch, HandoffId, RequestId, WorkerId
from core.kv_region import KVRegion
from core.kv_spec import KVSpec
from kv_transfer.base import Identity, Run
from kv_transfer.connectors import create_receivers, create_senders
from kv_transfer.loopback import LoopbackNetwork

pytestmark = pytest.mark.asyncio(loop_scope="module")
Decode = Any
Prefill = Any
TIMEOUT_S = 10.0


def run(source: int, position: int, num_blocks: int) -> Run:
    return Run(BlockId(source), position, num_blocks)


@pytest.fixture
def remote(connector: str) -> str:
    if connector == "loopback":
        pytest.skip("loopback has no process to lose")
    return connector


@pytest_asyncio.fixture(loop_scope="module")
async def mortal(remote: str, network: LoopbackNetwork, start_prefill: Any) -> AsyncIterator[Prefill]:
    """A prefill worker of this test's own."""
    other = await start_prefill(remote, network)
    yield other
    await other.close()


async def caught_in_the_act(prefill: Prefill, grant: Grant) -> asyncio.Task[None]:
    """One block sent, the next being copied."""
    await prefill.open(grant)
    await prefill.send(grant.handoff_id, [run(0, 0, 1)])
    await prefill.call("hold")
    sending = asyncio.create_task(prefill.send(grant.handoff_id, [run(1, 1, 2)]))
    assert await prefill.call("held")
    return sending


async def test_a_killed_sender_fails_the_transfer_and_is_quiet(decode: Decode, mortal: Prefill) -> None:
    grant = decode.grant([3, 4, 5])
    sending = await caught_in_the_act(mortal, grant)
    waiting = asyncio.create_task(decode.receivers.wait_sealed(grant.handoff_id, 60.0))
    await mortal.kill()
    with pytest.raises(TransferFailed, match="lost the sender"):
        await asyncio.wait_for(waiting, TIMEOUT_S)
    assert await decode.receivers.cancel(grant.handoff_id)
    with pytest.raises(ConnectionResetError):
        await sending


async def test_a_paused_sender_is_not_a_dead_one(decode: Decode, mortal: Prefill, remote: str) -> None:
    """Nobody but the receiver writes over tcp and ucx; a shm writer may go on when it wakes."""
    grant = decode.grant([3, 4, 5])
    sending = await caught_in_the_act(mortal, grant)
    mortal.pause()
    assert await decode.receivers.cancel(grant.handoff_id) == (remote != "shm")
    quiet = asyncio.create_task(decode.receivers.wait_quiet(grant.handoff_id))
    await mortal.kill()
    await asyncio.wait_for(quiet, TIMEOUT_S)
    assert await decode.receivers.cancel(grant.handoff_id)
    with pytest.raises(ConnectionResetError):
        await sending


async def test_a_killed_receiver_fails_the_send(
    decode: Decode, mortal: Prefill, remote: str, network: LoopbackNetwork, options: Any
) -> None:
    await mortal.call("listen")
    grant = await mortal.expect(HandoffId(RequestId("to-be-killed"), 0), [7, 8, 9])
    options = replace(options, connect_timeout_s=2.0)  # ucx takes as long to find that nobody answers
    senders = create_senders(remote, decode.region, decode.identity, options, network)
    transfer = await senders.open(grant)
    await transfer.send([run(0, 0, 1)])
    await mortal.kill()
    with pytest.raises(TransferFailed):
        await asyncio.wait_for(send_forever(transfer), TIMEOUT_S)
    assert await transfer.cancel()
    with pytest.raises(TransferFailed):
        await senders.open(grant)
    await senders.close()


async def send_forever(transfer: Any) -> None:
    while True:
        await transfer.send([run(1, 1, 2)])


async def test_a_closed_sender_fails_what_it_had_open(decode: Decode, prefill: Prefill) -> None:
    grant = decode.grant([3, 4, 5])
    sending = await caught_in_the_act(prefill, grant)
    closing = asyncio.create_task(prefill.call("close_senders"))
    await prefill.call("release")
    await closing
    with contextlib.suppress(Cancelled, TransferFailed):
        await sending
    with pytest.raises(TransferFailed):
        await decode.receivers.wait_sealed(grant.handoff_id, TIMEOUT_S)
    await asyncio.wait_for(decode.receivers.wait_quiet(grant.handoff_id), TIMEOUT_S)


async def test_another_geometry_is_refused_naming_both(
    decode: Decode, connector: str, network: LoopbackNetwork, start_prefill: Any
) -> None:
    other = await start_prefill(connector, network, spec=replace(decode.identity.spec, num_layers=7))
    grant = decode.grant([3])
    with pytest.raises(TransferFailed, match="num_layers: 2 here, 7 there"):
        await other.open(grant)
    await other.close()


async def test_a_grant_of_another_incarnation_is_refused_naming_both(
    decode: Decode, prefill: Prefill
) -> None:
    grant = decode.grant([3])
    for stale in (replace(grant, epoch=Epoch(4)), replace(grant, worker_id=WorkerId("someone"))):
        with pytest.raises(
            Exception, match=f"granted by {stale.worker_id} in epoch {stale.epoch}, .* decode-here"
        ):
            await prefill.open(stale)


async def test_nothing_is_left_behind(connector: str, options: Any, spec: KVSpec) -> None:
    """Both ends in this process, closed with a transfer sealed and another in progress."""
    counts = []
    for number in range(5):
        await one_round(connector, spec, options, number)
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert min(counts[1:]) <= counts[0], counts  # a library may close one a little later


async def one_round(connector: str, spec: KVSpec, options: Any, number: int) -> None:
    network = LoopbackNetwork()
    regions = [KVRegion.create(spec.block_bytes, 8) for _ in range(2)]
    here = Identity(WorkerId("here"), Epoch(1), spec)
    receivers = create_receivers([connector], regions[0], here, lambda grant: True, options, network)
    await receivers.start()
    senders = create_senders(connector, regions[1], here, options, network)
    for name in ("sealed", "abandoned"):
        handoff_id = HandoffId(RequestId(name), number)
        blocks = (BlockId(1), BlockId(2))
        grant = Grant(handoff_id, here.worker_id, here.epoch, 8, 0, blocks, receivers.addresses)
        receivers.expect(grant)
        transfer = await senders.open(grant)
        await transfer.send([run(0, 0, 2)])
        if name == "sealed":
            seal = Seal(handoff_id, here.worker_id, here.epoch, here.epoch, 8, BlockHash(b""), ())
            await transfer.seal(seal)
            await receivers.wait_sealed(handoff_id, TIMEOUT_S)
    await senders.close()
    await receivers.close()
    for region in regions:
        region.close()


async def test_a_process_that_fails_does_not_hang(connector: str) -> None:
    """Nothing is closed; whatever threads a connector has must not keep the process."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FAILING, connector, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert b"on purpose" in errors


FAILING = """
import asyncio, sys
from core.ids import Epoch, WorkerId
from core.kv_region import KVRegion
from core.kv_spec import KVSpec
from core.kv_spec import DType, KVSpec
from kv_transfer.base import Identity
from kv_transfer.connectors import create_receivers
from kv_transfer.loopback import LoopbackNetwork

async def main():
    spec = KVSpec(1, 1, 8, 4, DType.FLOAT32, "tests")
    region = KVRegion.create(spec.block_bytes, 4)
    identity = Identity(WorkerId("here"), Epoch(1), spec)
    receivers = create_receivers([sys.argv[1]], region, identity, lambda grant: True, network=LoopbackNetwork())
    await receivers.start()
    raise RuntimeError("on purpose")

asyncio.run(main())
"""
