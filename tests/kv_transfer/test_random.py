"""Many handoffs at once, each ended at a random moment by either side. What must hold whatever the order:

- blocks that are sealed hold exactly what was sent;
- blocks that were said to be quiet are never written again, and every handoff gets there.
"""

import asyncio
import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import TandemError
from core.grant import Grant, Seal
from core.ids import BlockHash, BlockId, Epoch, WorkerId
from core.kv_region import KVRegion
from kv_transfer.base import Identity, Run
from kv_transfer.connectors import SenderSet, create_senders
from kv_transfer.loopback import LoopbackNetwork
from kv_transfer.sending import batches, split

Decode = Any
NUM_HANDOFFS = 40
SOURCE_BLOCKS = 64
MARK = 0xEE
WHO = (WorkerId("random"), Epoch(5))


async def send(senders: SenderSet, grant: Grant, source: int, rng: random.Random) -> None:
    """In two chunks, with pauses; sometimes given up. Any typed error is a fair end."""
    half, whole = len(grant.block_ids) // 2, len(grant.block_ids)
    try:
        transfer = await senders.open(grant)
        if rng.random() < 0.2:
            asyncio.get_running_loop().call_later(
                rng.random() * 0.003, asyncio.ensure_future, transfer.cancel()
            )
        for first, last in ((0, half), (half, whole)):
            await asyncio.sleep(rng.random() * 0.002)
            await transfer.send([Run(BlockId(source + first), first, last - first)])
        await transfer.seal(
            Seal(grant.handoff_id, *WHO, grant.epoch, grant.num_prompt_tokens, BlockHash(b""), ())
        )
    except TandemError:
        return


async def receive(decode: Decode, grant: Grant, patience_s: float) -> bool:
    """Whether it was sealed; on return the blocks are ours in any case."""
    try:
        await decode.receivers.wait_sealed(grant.handoff_id, patience_s)
    except TandemError:
        if not await decode.receivers.cancel(grant.handoff_id):
            await decode.receivers.wait_quiet(grant.handoff_id)
        return False
    return True


async def one_handoff(decode: Decode, senders: SenderSet, grant: Grant, source: bytes, seed: int) -> bool:
    rng = random.Random(seed)
    first = rng.randrange(SOURCE_BLOCKS - 4)
    sending = asyncio.create_task(send(senders, grant, first, rng))
    is_sealed = await receive(decode, grant, rng.choice([0.0, 0.001, 0.003, 0.006, 10.0, 10.0]))
    if is_sealed:
        num_bytes = len(grant.block_ids) * decode.region.block_bytes
        expected = source[first * decode.region.block_bytes :][:num_bytes]
        assert decode.blocks()[list(grant.block_ids)].tobytes() == expected
    for block in grant.block_ids:
        with decode.region.view(block) as memory:
            memory[:] = bytes([MARK]) * len(memory)
    await sending
    return is_sealed


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("seed", range(3))
async def test_quiet_blocks_are_never_written_again(
    decode: Decode, connector: str, network: LoopbackNetwork, options: Any, seed: int
) -> None:
    rng = random.Random(seed)
    region = KVRegion.create(decode.region.block_bytes, SOURCE_BLOCKS)
    source = np.random.default_rng(seed).bytes(len(region.memory))
    with memoryview(region.memory) as memory:
        memory[:] = source
    senders = create_senders(connector, region, Identity(*WHO, decode.identity.spec), options, network)
    blocks = rng.sample(range(decode.region.num_blocks), 2 * NUM_HANDOFFS)
    grants = [decode.grant(blocks[2 * i : 2 * i + 2]) for i in range(NUM_HANDOFFS)]
    handoffs = [one_handoff(decode, senders, grant, source, rng.randrange(1 << 30)) for grant in grants]
    outcomes = await asyncio.wait_for(asyncio.gather(*handoffs), 60)
    assert any(outcomes)
    assert not all(outcomes)
    await senders.close()
    assert (decode.blocks()[blocks] == MARK).all()
    untouched = sorted(set(range(decode.region.num_blocks)) - set(blocks))
    assert not decode.blocks()[untouched].any()
    region.close()


@given(
    block_ids=st.lists(st.integers(0, 40), min_size=1, max_size=40, unique=True),
    cuts=st.sets(st.integers(1, 39)),
    max_blocks=st.integers(1, 8),
)
def test_pieces_are_adjacent_on_both_sides_and_cover_the_runs(
    block_ids: list[int], cuts: set[int], max_blocks: int
) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(block_ids)), len(block_ids)]
    runs = [Run(BlockId(100 + 2 * a), a, b - a) for a, b in itertools.pairwise(edges)]
    pieces = list(split(runs, [BlockId(block) for block in block_ids], max_blocks))
    sources = {r.position + i: r.source_block + i for r in runs for i in range(r.num_blocks)}
    covered = []
    for piece in pieces:
        assert 1 <= piece.num_blocks <= max_blocks
        for i in range(piece.num_blocks):
            assert piece.source + i == sources[piece.position + i]
            assert piece.destination + i == block_ids[piece.position + i]
            covered.append(piece.position + i)
    assert covered == list(range(len(block_ids)))
    grouped = list(batches(iter(pieces), max_blocks))
    assert [piece for batch in grouped for piece in batch] == pieces
    assert all(sum(p.num_blocks for p in batch) < 2 * max_blocks for batch in grouped)
