"""What every connector must do, in one suite over all of them: two real processes, except for loopback."""

import asyncio
import contextlib
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from core.errors import Cancelled, StaleEpoch, TandemError, TransferFailed
from core.grant import Grant, GrantSigner
from core.ids import BlockHash, BlockId, Epoch, new_epoch
from kv_transfer.base import Run

pytestmark = pytest.mark.asyncio(loop_scope="module")

# The fixtures' types live in conftest.py, which cannot be imported by name.
Decode = Any
Prefill = Any
TIMEOUT_S = 10.0


def run(source: int, position: int, num_blocks: int) -> Run:
    return Run(BlockId(source), position, num_blocks)


async def hand_off(prefill: Prefill, grant: Grant, chunks: list[list[Run]]) -> None:
    await prefill.open(grant)
    for chunk in chunks:
        await prefill.send(grant.handoff_id, chunk)
    await prefill.seal(prefill.seal_of(grant))


def assert_received(decode: Decode, prefill: Prefill, grant: Grant, runs: list[Run]) -> None:
    """The granted blocks hold what was sent, and no other block has changed from zero."""
    expected = np.zeros_like(decode.blocks())
    for r in runs:
        for i in range(r.num_blocks):
            expected[grant.block_ids[r.position + i]] = prefill.blocks[r.source_block + i]
    assert np.array_equal(decode.blocks(), expected)


async def test_scattered_runs_arrive_exactly_and_neighbours_stay(decode: Decode, prefill: Prefill) -> None:
    rng = random.Random(3)
    blocks = [*rng.sample(range(0, 60), 17), *range(70, 84)]
    grant = decode.grant(blocks)
    runs = [run(40, 0, 9), run(2, 9, 1), run(12, 10, len(blocks) - 10)]
    await hand_off(prefill, grant, [runs])
    seal = await decode.receivers.wait_sealed(grant.handoff_id, TIMEOUT_S)
    assert_received(decode, prefill, grant, runs)
    assert seal.covers(len(blocks))
    assert seal.first_tokens[0].token_id == 42


async def test_chunks_are_sent_as_they_come(decode: Decode, prefill: Prefill) -> None:
    grant = decode.grant([5, 6, 7, 30, 31, 9])
    chunks = [[run(0, 0, 2)], [run(2, 2, 1), run(50, 3, 1)], [], [run(80, 4, 2)]]
    await prefill.open(grant)
    for chunk in chunks:
        await prefill.send(grant.handoff_id, chunk)
    assert await prefill.call("num_bytes_sent", grant.handoff_id) == 6 * decode.region.block_bytes
    returned = await prefill.seal(prefill.seal_of(grant))
    assert await decode.receivers.wait_sealed(grant.handoff_id, TIMEOUT_S) == returned
    assert_received(decode, prefill, grant, [r for chunk in chunks for r in chunk])


async def test_everything_cached_needs_only_a_seal(decode: Decode, prefill: Prefill) -> None:
    grant = decode.grant([], num_cached_tokens=32)
    await hand_off(prefill, grant, [])
    seal = await decode.receivers.wait_sealed(grant.handoff_id, TIMEOUT_S)
    assert seal.runs == ()
    assert not decode.blocks().any()


async def test_many_handoffs_interleave(decode: Decode, prefill: Prefill) -> None:
    rng = random.Random(8)
    blocks = rng.sample(range(96), 96)
    grants = [decode.grant(blocks[3 * i : 3 * i + 3]) for i in range(32)]
    runs = [run(rng.randrange(90), 0, 3) for _ in grants]
    await asyncio.gather(
        *(
            hand_off(prefill, grant, [[replace(r, num_blocks=1)], [run(r.source_block + 1, 1, 2)]])
            for grant, r in zip(grants, runs, strict=True)
        )
    )
    await asyncio.gather(*(decode.receivers.wait_sealed(g.handoff_id, TIMEOUT_S) for g in grants))
    received = decode.blocks()
    for grant, r in zip(grants, runs, strict=True):
        expected = prefill.blocks[r.source_block : r.source_block + 3]
        assert np.array_equal(received[list(grant.block_ids)], expected)


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([], "do not tile 3 blocks"),
        ([[run(0, 0, 2)]], "do not tile 3 blocks"),
        ([[run(0, 1, 2)]], "do not tile 3 blocks"),
        ([[run(0, 0, 3)], [run(0, 2, 1)]], "do not tile 3 blocks"),
    ],
)
async def test_a_seal_that_does_not_tile_the_grant_fails(
    decode: Decode, prefill: Prefill, chunks: list[list[Run]], reason: str
) -> None:
    grant = decode.grant([1, 2, 3])
    await hand_off(prefill, grant, chunks)
    with pytest.raises(TransferFailed, match=reason):
        await decode.receivers.wait_sealed(grant.handoff_id, TIMEOUT_S)
    assert await decode.receivers.cancel(grant.handoff_id)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prefill_worker_id": "another"}, "prefill worker"),
        ({"prefill_epoch": Epoch(9)}, "prefill epoch 9 sealed, 77 granted"),
        ({"decode_epoch": Epoch(9)}, "decode epoch"),
        ({"num_tokens": 5}, "number of tokens 5 sealed, 4 granted"),
    ],
)
async def test_a_seal_of_something_else_fails(
    decode: Decode, prefill: Prefill, changes: dict[str, Any], reason: str
) -> None:
    grant = decode.grant([1])
    await prefill.open(grant)
    await prefill.send(grant.handoff_id, [run(0, 0, 1)])
    await prefill.seal(replace(prefill.seal_of(grant), **changes))
    with pytest.raises(TransferFailed, match=reason):
        await decode.receivers.wait_sealed(grant.handoff_id, TIMEOUT_S)
    assert await decode.receivers.cancel(grant.handoff_id)


async def test_the_chain_hash_is_compared_when_given(decode: Decode, prefill: Prefill) -> None:
    good, bad = decode.sign([]), decode.sign([])
    decode.receivers.expect(good, BlockHash(b"chain"))
    decode.receivers.expect(bad, BlockHash(b"other"))
    await hand_off(prefill, good, [])
    await hand_off(prefill, bad, [])
    await decode.receivers.wait_sealed(good.handoff_id, TIMEOUT_S)
    with pytest.raises(TransferFailed, match="chain hash"):
        await decode.receivers.wait_sealed(bad.handoff_id, TIMEOUT_S)


async def refusal_of(prefill: Prefill, grant: Grant) -> TandemError:
    with pytest.raises(TandemError) as refused:
        await prefill.open(grant)
    return refused.value


async def test_forged_stale_and_unknown_grants_are_refused(decode: Decode, prefill: Prefill) -> None:
    grant = decode.grant([4, 5])
    forged = await refusal_of(prefill, replace(grant, mac=bytes(32)))
    assert isinstance(forged, TransferFailed)
    assert "signature" in str(forged)
    other_blocks = await refusal_of(prefill, replace(grant, block_ids=(BlockId(4), BlockId(6))))
    assert "not the grant that was given" in str(other_blocks)
    stale = await refusal_of(prefill, replace(grant, epoch=Epoch(3)))
    assert isinstance(stale, StaleEpoch)
    assert "3" in str(stale)
    assert str(decode.identity.epoch) in str(stale)
    unknown = await refusal_of(prefill, decode.sign([9]))
    assert isinstance(unknown, StaleEpoch)
    assert "not expected" in str(unknown)
    await hand_off(prefill, grant, [[run(1, 0, 2)]])
    await decode.receivers.wait_sealed(grant.handoff_id, TIMEOUT_S)
    over = await refusal_of(prefill, grant)
    assert isinstance(over, StaleEpoch)
    assert "is over" in str(over)


async def test_a_grant_is_opened_once(decode: Decode, prefill: Prefill) -> None:
    grant = decode.grant([4])
    await prefill.open(grant)
    assert "already receiving" in str(await refusal_of(prefill, grant))


async def send_until_refused(prefill: Prefill, grant: Grant, again: Run) -> None:
    """What is sent before the request to stop arrives is late: it must go nowhere."""
    while True:
        await prefill.send(grant.handoff_id, [again])


async def test_cancel_by_the_receiver_discards_what_follows(decode: Decode, prefill: Prefill) -> None:
    grant, other = decode.grant([10, 11, 12, 13]), decode.grant([20, 21])
    await prefill.open(grant)
    await prefill.open(other)
    await prefill.send(grant.handoff_id, [run(0, 0, 1)])
    waiting = asyncio.create_task(decode.receivers.wait_sealed(grant.handoff_id, TIMEOUT_S))
    await asyncio.sleep(0)
    assert await decode.receivers.cancel(grant.handoff_id)
    with pytest.raises(Cancelled):
        await waiting
    before = decode.blocks()
    with pytest.raises(Cancelled, match="cancelled by decode-here"):
        await asyncio.wait_for(send_until_refused(prefill, grant, run(1, 1, 3)), TIMEOUT_S)
    assert np.array_equal(decode.blocks(), before)
    assert await decode.receivers.cancel(grant.handoff_id)
    await prefill.send(other.handoff_id, [run(30, 0, 2)])
    await prefill.seal(prefill.seal_of(other))
    await decode.receivers.wait_sealed(other.handoff_id, TIMEOUT_S)
    assert np.array_equal(decode.blocks()[20:22], prefill.blocks[30:32])


async def test_cancel_by_the_receiver_while_the_sender_copies(
    decode: Decode, prefill: Prefill, connector: str
) -> None:
    """A shm writer in the middle of a copy is not quiet until it has ended; elsewhere we write ourselves."""
    grant = decode.grant([10, 11])
    await prefill.open(grant)
    await prefill.call("hold")
    sending = asyncio.create_task(prefill.send(grant.handoff_id, [run(0, 0, 2)]))
    assert await prefill.call("held")
    is_quiet = await decode.receivers.cancel(grant.handoff_id)
    assert is_quiet == (connector != "shm")
    quiet = asyncio.create_task(decode.receivers.wait_quiet(grant.handoff_id))
    await asyncio.sleep(0)
    assert quiet.done() == is_quiet
    await prefill.call("release")
    with contextlib.suppress(Cancelled):  # unless it is done before the request to stop arrives
        await sending
    await asyncio.wait_for(quiet, TIMEOUT_S)
    with pytest.raises(Cancelled):
        await asyncio.wait_for(send_until_refused(prefill, grant, run(0, 0, 2)), TIMEOUT_S)
    assert await decode.receivers.cancel(grant.handoff_id)


async def test_cancel_by_the_sender(decode: Decode, prefill: Prefill) -> None:
    grant = decode.grant([10, 11, 12])
    await prefill.open(grant)
    await prefill.send(grant.handoff_id, [run(0, 0, 1)])
    assert await prefill.cancel(grant.handoff_id)
    assert await prefill.cancel(grant.handoff_id)
    with pytest.raises(TransferFailed, match="given up by the sender"):
        await decode.receivers.wait_sealed(grant.handoff_id, TIMEOUT_S)
    assert await decode.receivers.cancel(grant.handoff_id)
    with pytest.raises(Cancelled):
        await prefill.send(grant.handoff_id, [run(1, 1, 2)])
    again = decode.grant([10, 11, 12])
    await hand_off(prefill, again, [[run(0, 0, 3)]])
    await decode.receivers.wait_sealed(again.handoff_id, TIMEOUT_S)


async def test_cancel_by_the_sender_waits_for_its_copies(decode: Decode, prefill: Prefill) -> None:
    grant = decode.grant([10])
    await prefill.open(grant)
    await prefill.call("hold")
    sending = asyncio.create_task(prefill.send(grant.handoff_id, [run(0, 0, 1)]))
    assert await prefill.call("held")
    assert not await prefill.cancel(grant.handoff_id)
    await prefill.call("release")
    with pytest.raises(Cancelled):
        await sending
    assert await prefill.cancel(grant.handoff_id)


async def test_cancel_may_come_before_the_grant_or_twice(decode: Decode) -> None:
    grant = decode.sign([1])
    assert await decode.receivers.cancel(grant.handoff_id)
    with pytest.raises(StaleEpoch):
        decode.receivers.expect(grant)
    unopened = decode.grant([1])
    assert await decode.receivers.cancel(unopened.handoff_id)
    assert await decode.receivers.cancel(unopened.handoff_id)


async def test_a_receiver_with_a_new_epoch_is_greeted_again_and_old_grants_are_stale(
    decode: Decode, prefill: Prefill
) -> None:
    old = decode.grant([1, 2])
    await hand_off(prefill, old, [[run(0, 0, 2)]])
    await decode.receivers.wait_sealed(old.handoff_id, TIMEOUT_S)
    stale = decode.grant([3])
    await decode.receivers.cancel(stale.handoff_id)
    decode.identity, decode.signer = replace(decode.identity, epoch=new_epoch()), GrantSigner()
    decode.receivers.renew(decode.identity, decode.signer.verify)
    fresh = decode.grant([1, 2, 3])
    await prefill.open(fresh)
    await prefill.send(fresh.handoff_id, [run(10, 0, 1)])
    with pytest.raises(StaleEpoch):
        await prefill.open(stale)
    await prefill.send(fresh.handoff_id, [run(11, 1, 2)])
    await prefill.seal(prefill.seal_of(fresh))
    await decode.receivers.wait_sealed(fresh.handoff_id, TIMEOUT_S)
    assert_received(decode, prefill, fresh, [run(10, 0, 3)])


async def test_transfers_that_meet_a_new_epoch_at_once_share_its_connection(
    decode: Decode, prefill: Prefill
) -> None:
    old = decode.grant([1])
    await hand_off(prefill, old, [[run(0, 0, 1)]])
    await decode.receivers.wait_sealed(old.handoff_id, TIMEOUT_S)
    decode.identity, decode.signer = replace(decode.identity, epoch=new_epoch()), GrantSigner()
    decode.receivers.renew(decode.identity, decode.signer.verify)
    grants = [decode.grant([2 * index, 2 * index + 1]) for index in range(8)]
    await asyncio.gather(*(hand_off(prefill, grant, [[run(4, 0, 2)]]) for grant in grants))
    for grant in grants:
        await decode.receivers.wait_sealed(grant.handoff_id, TIMEOUT_S)
