"""Prefixes in hash blocks, whatever the size of a pool's blocks, and what is learnt of a wrong belief."""

from dataclasses import replace

import pytest

from cluster.store import Store
from core.block_hash import HASH_BLOCK_TOKENS, hash_chain, pool_chain
from gateway.routing.prefix_index import ERRORS, PrefixIndex
from tests.gateway.routing.tables import SPEC, known

PROMPT = list(range(10 * HASH_BLOCK_TOKENS + 5))
CHAIN = hash_chain(PROMPT, "m")


def index_of(block_size: int, num_published: int):
    """A worker whose pool has blocks of that size, and has published the prompt's first so many."""
    record = replace(known("w").record, kv_spec=replace(SPEC, block_size=block_size))
    index = PrefixIndex(Store("redis://127.0.0.1:1"))
    index.follow(record)
    index._feed._due.clear()  # it was met
    index.mirror.store(record.epoch, pool_chain(CHAIN, block_size)[:num_published])
    return index, record


@pytest.mark.parametrize(
    ("block_size", "num_published", "depth"), [(16, 7, 7), (32, 3, 6), (64, 2, 8), (64, 9, 8)]
)
async def test_a_pool_s_blocks_may_be_larger_than_hash_blocks(block_size, num_published, depth):
    index, record = index_of(block_size, num_published)
    assert await index.overlap(CHAIN, block_size) == {record.epoch: depth}


async def test_what_a_worker_turns_out_to_have_is_counted_and_believed():
    def errors(kind: str) -> float:
        return ERRORS.labels(kind=kind)._value.get()

    index, record = index_of(32, 4)
    before = errors("missing"), errors("unexpected")
    index.observe(record, CHAIN, 128, 64, len(PROMPT))
    assert errors("missing") - before[0] == 64
    assert await index.overlap(CHAIN, 32) == {record.epoch: 4}
    index.observe(record, CHAIN, 64, 160, len(PROMPT))
    assert errors("unexpected") - before[1] == 96
    assert await index.overlap(CHAIN, 32) == {record.epoch: 10}


async def test_the_block_of_the_last_token_is_no_error():
    """It is held, and computed all the same."""
    index, record = index_of(16, 10)
    before = ERRORS.labels(kind="missing")._value.get()
    index.observe(record, CHAIN, 160, 144, 160)
    assert ERRORS.labels(kind="missing")._value.get() == before
    assert await index.overlap(CHAIN, 16) == {record.epoch: 10}
