"""A pool and its mirror: what is moved is equal to the bit, what is not is left alone. The pool is on a GPU too where
there is one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.errors import EngineFailed
from core.ids import HandoffId, RequestId
from core.kv_region import KVRegion
from core.kv_spec import DType, KVSpec
from core.sampling import SamplingParams
from engine.build import build_engine
from engine.config import EngineConfig
from engine.engine_geometry import EngineGeometry
from engine.host_mirror import HostMirror, completed_blocks, runs_of
from engine.kv_pool import KVPool
from engine.scheduler import Work
from engine.sequence import Sequence

SPEC = KVSpec(2, 2, 8, 16, DType.BFLOAT16, "f")
NUM_BLOCKS = 12
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]


class Rig:
    """A pool and a region of any bits, NaNs of every kind among them."""

    def __init__(self, num_staged: int, device: str = "cpu") -> None:
        self.pool = KVPool.allocate(SPEC, NUM_BLOCKS, device)
        self.region = KVRegion.create(SPEC.block_bytes, NUM_BLOCKS)
        noise = torch.Generator().manual_seed(3)
        bits = torch.randint(-(1 << 15), 1 << 15, (2, *self.pool.data.shape), generator=noise).short()
        self.pool.data.view(torch.int16).copy_(bits[0])
        self.region.view(0, NUM_BLOCKS)[:] = bits[1].numpy().tobytes()
        self.mirror = HostMirror(self.pool, self.region, num_staged * SPEC.block_bytes)

    def in_pool(self) -> list[bytes]:
        return [block.view(torch.uint8).cpu().numpy().tobytes() for block in self.pool.data]

    def in_region(self) -> list[bytes]:
        return [bytes(self.region.view(block)) for block in range(NUM_BLOCKS)]

    def close(self) -> None:
        del self.mirror
        self.region.close()


any_blocks = given(
    blocks=st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True), num_staged=st.integers(0, NUM_BLOCKS + 1)
)


@pytest.mark.parametrize("device", DEVICES)
@any_blocks
def test_what_is_published_is_the_pools_and_the_rest_of_the_region_stays(device, blocks, num_staged):
    rig = Rig(num_staged, device)
    pool, region = rig.in_pool(), rig.in_region()
    rig.mirror.publish(blocks)
    assert rig.in_region() == [(pool if block in blocks else region)[block] for block in range(NUM_BLOCKS)]
    assert rig.in_pool() == pool
    rig.close()


@pytest.mark.parametrize("device", DEVICES)
@any_blocks
def test_what_is_taken_in_is_the_regions_and_the_rest_of_the_pool_stays(device, blocks, num_staged):
    rig = Rig(num_staged, device)
    pool, region = rig.in_pool(), rig.in_region()
    rig.mirror.take_in(blocks)
    assert rig.in_pool() == [(region if block in blocks else pool)[block] for block in range(NUM_BLOCKS)]
    assert rig.in_region() == region
    rig.close()


def test_adjacent_blocks_are_one_run():
    assert list(runs_of([2, 3, 4, 7, 9, 10])) == [(2, 0, 3), (7, 3, 1), (9, 4, 2)]
    assert list(runs_of([5])) == [(5, 0, 1)]
    assert list(runs_of([])) == []


@given(num_tokens=st.integers(1, 100), num_cached_blocks=st.integers(0, 6), data=st.data())
def test_the_chunks_of_a_prompt_complete_each_of_its_blocks_once_none_too_early(
    num_tokens, num_cached_blocks, data
):
    blocks = list(range(40, 40 - -(-num_tokens // 16), -1))
    num_cached = 16 * min(num_cached_blocks, (num_tokens - 1) // 16)
    params = SamplingParams(5)
    sequence = Sequence(HandoffId(RequestId("r"), 1), [0] * num_tokens, num_tokens, params, "f")
    sequence.block_ids, sequence.num_computed = blocks, num_cached
    completed = []
    while sequence.num_to_compute:
        work = Work(sequence, data.draw(st.integers(1, sequence.num_to_compute)))
        completed += completed_blocks(work, 16)
        sequence.num_computed += work.num_tokens
        end = len(blocks) if not sequence.num_to_compute else sequence.num_computed // 16
        assert completed == blocks[num_cached // 16 : end]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_told_in_a_sentence(tiny_model):
    config = EngineConfig(str(tiny_model), device="cuda", num_blocks=2)
    geometry = EngineGeometry(config)
    region = KVRegion.create(geometry.kv_spec.block_bytes, 2)
    with pytest.raises(EngineFailed, match="no GPU here"):
        build_engine(config, geometry, region)
    region.close()
