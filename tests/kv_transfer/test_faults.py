"""A sender that fails on purpose: the seal catches corruption on every connector, and a new attempt succeeds."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from core.errors import DeadlineExceeded, TransferFailed
from core.grant import Grant, Seal
from core.ids import BlockHash, BlockId, Epoch, WorkerId
from core.kv_region import KVRegion
from kv_transfer.base import Identity, KVSender, Run
from kv_transfer.faults import Faults, Stage, create_faulty_senders
from kv_transfer.loopback import LoopbackNetwork

pytestmark = pytest.mark.asyncio(loop_scope="module")
Decode = Any
TIMEOUT_S = 10.0


class Prefill:
    """The sending worker, in this process."""

    def __init__(self, spec: Any, connector: str, options: Any, network: LoopbackNetwork) -> None:
        self.identity = Identity(WorkerId("faulty"), Epoch(8), spec)
        self.region = KVRegion.create(spec.block_bytes, 16)
        with memoryview(self.region.memory) as memory:
            memory[:] = np.random.default_rng(1).bytes(len(memory))
        self._make = (connector, self.region, self.identity, options, network)
        self.senders: list[KVSender] = []

    def with_faults(self, faults: Faults) -> Any:
        self.senders.append(create_faulty_senders(faults, *self._make))
        return self.senders[-1]

    async def hand_off(self, senders: Any, grant: Grant) -> None:
        """The blocks from the fourth on, in two chunks where there are several."""
        transfer = await senders.open(grant)
        half, whole = len(grant.block_ids) // 2, len(grant.block_ids)
        for first, last in ((0, half), (half, whole)):
            if last > first:
                await transfer.send([Run(BlockId(4 + first), first, last - first)])
        who = self.identity
        await transfer.seal(
            Seal(
                grant.handoff_id,
                who.worker_id,
                who.epoch,
                grant.epoch,
                grant.num_prompt_tokens,
                BlockHash(b""),
                (),
            )
        )

    def sent(self, grant: Grant) -> bytes:
        return bytes(self.region.view(BlockId(4), len(grant.block_ids)))

    async def close(self) -> None:
        for senders in self.senders:
            await senders.close()
        self.region.close()


@pytest_asyncio.fixture(loop_scope="module")
async def faulty(spec: Any, connector: str, options: Any, network: LoopbackNetwork) -> AsyncIterator[Prefill]:
    prefill = Prefill(spec, connector, options, network)
    yield prefill
    await prefill.close()


async def test_one_flipped_bit_is_caught_and_another_attempt_succeeds(
    decode: Decode, faulty: Prefill
) -> None:
    senders = faulty.with_faults(Faults(corrupts=True, every=2))
    grant = decode.grant([1, 9, 10, 11])
    await faulty.hand_off(senders, grant)
    with pytest.raises(TransferFailed, match="bad digest"):
        await decode.receivers.wait_sealed(grant.handoff_id, TIMEOUT_S)
    assert await decode.receivers.cancel(grant.handoff_id)
    again = decode.grant([1, 9, 10, 11], attempt=1)
    await faulty.hand_off(senders, again)
    await decode.receivers.wait_sealed(again.handoff_id, TIMEOUT_S)
    assert decode.blocks()[[1, 9, 10, 11]].tobytes() == faulty.sent(again)


async def test_the_source_is_left_alone(decode: Decode, faulty: Prefill) -> None:
    before = bytes(faulty.region.memory)
    grant = decode.grant([1])
    await faulty.hand_off(faulty.with_faults(Faults(corrupts=True)), grant)
    assert bytes(faulty.region.memory) == before


async def test_a_lost_seal_meets_the_deadline(decode: Decode, faulty: Prefill) -> None:
    grant = decode.grant([1, 2])
    await faulty.hand_off(faulty.with_faults(Faults(drops_seal=True, delay_s=0.001)), grant)
    with pytest.raises(DeadlineExceeded):
        await decode.receivers.wait_sealed(grant.handoff_id, 0.2)
    assert await decode.receivers.cancel(grant.handoff_id)


@pytest.mark.parametrize("blocks", [[1, 9, 10, 11, 12], [3]])
async def test_blocks_may_come_in_any_order(decode: Decode, faulty: Prefill, blocks: list[int]) -> None:
    grant = decode.grant(blocks)
    await faulty.hand_off(faulty.with_faults(Faults(reorders=True)), grant)
    seal = await decode.receivers.wait_sealed(grant.handoff_id, TIMEOUT_S)
    assert [run.position for run in seal.runs] == list(reversed(range(len(blocks))))
    assert decode.blocks()[blocks].tobytes() == faulty.sent(grant)


@pytest.mark.parametrize("blocks", [[1, 9, 10, 11, 12], [3]])
@pytest.mark.parametrize(
    "faults",
    [Faults(duplicates=True, every=2), Faults(drops_run=True, every=2), Faults(seal_first=True, every=2)],
)
async def test_a_block_twice_never_or_after_the_seal_is_a_failed_transfer_and_another_attempt_succeeds(
    decode: Decode, faulty: Prefill, faults: Faults, blocks: list[int]
) -> None:
    senders = faulty.with_faults(faults)
    grant = decode.grant(blocks)
    with contextlib.suppress(TransferFailed) if faults.seal_first else contextlib.nullcontext():
        await faulty.hand_off(senders, grant)
    with pytest.raises(TransferFailed, match="do not tile"):
        await decode.receivers.wait_sealed(grant.handoff_id, TIMEOUT_S)
    assert await decode.receivers.cancel(grant.handoff_id)
    again = decode.grant(blocks, attempt=1)
    await faulty.hand_off(senders, again)
    await decode.receivers.wait_sealed(again.handoff_id, TIMEOUT_S)
    assert decode.blocks()[blocks].tobytes() == faulty.sent(again)


async def test_nothing_is_written_after_the_seal(decode: Decode, faulty: Prefill) -> None:
    grant = decode.grant([1, 9, 10])
    with pytest.raises(TransferFailed, match="already sealed"):
        await faulty.hand_off(faulty.with_faults(Faults(seal_first=True)), grant)
    with pytest.raises(TransferFailed):
        await decode.receivers.wait_sealed(grant.handoff_id, TIMEOUT_S)
    assert not decode.blocks()[10].any(), "the last block came after all"


@pytest.mark.parametrize("stage", Stage)
async def test_a_stage_can_fail(decode: Decode, faulty: Prefill, stage: Stage) -> None:
    senders = faulty.with_faults(replace(Faults(), fails_at=stage))
    grant = decode.grant([1, 2])
    with pytest.raises(TransferFailed, match=f"injected at {stage}"):
        await faulty.hand_off(senders, grant)
    assert await decode.receivers.cancel(grant.handoff_id)
