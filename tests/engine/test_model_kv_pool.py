"""The KV pool's views and the geometry that other workers rely on."""

import pytest
import torch

from core.ids import BlockId
from core.kv_region import KVRegion
from core.kv_spec import DType, KVSpec
from engine.kv_pool import KVPool

SPEC = KVSpec(3, 2, 16, 4, DType.FLOAT32, "f")


@pytest.fixture
def region():
    region = KVRegion.create(SPEC.block_bytes, 5)
    yield region
    region.close()


def test_a_block_is_one_region_of_memory(region):
    pool = KVPool.over(region, SPEC)
    for layer in range(SPEC.num_layers):
        pool.k_cache(layer)[3] = 1 + layer
        pool.v_cache(layer)[3] = 11 + layer
    values = torch.frombuffer(bytearray(region.view(BlockId(3))), dtype=torch.float32)
    tile = SPEC.num_kv_heads * SPEC.block_size * SPEC.head_dim
    assert values.view(3, 2, tile)[:, :, 0].tolist() == [[1, 11], [2, 12], [3, 13]]
    assert not any(region.view(BlockId(2))) and not any(region.view(BlockId(4)))
    pool.release()


def test_bytes_written_by_another_are_seen(region):
    pool = KVPool.over(region, SPEC)
    region.view(BlockId(1))[:4] = torch.tensor([7.0]).numpy().tobytes()
    assert pool.k_cache(0)[1, 0, 0, 0] == 7
    pool.release()


def test_a_region_closes_after_release_only(region):
    pool = KVPool.over(region, SPEC)
    with pytest.raises(BufferError):
        region.memory.close()
    assert pool.k_cache(2).sum() == 0
    pool.release()
    region.memory.close()


def test_copy_on_write_copies_every_layer():
    pool = KVPool.allocate(SPEC, 4)
    pool.data[2] = torch.randn_like(pool.data[2])
    pool.copy_block(2, 0)
    assert torch.equal(pool.data[0], pool.data[2])
    assert not pool.data[1].any()


def test_another_geometry_is_refused():
    region = KVRegion.create(SPEC.block_bytes * 2, 5)
    with pytest.raises(AssertionError):
        KVPool.over(region, SPEC)
    region.close()
