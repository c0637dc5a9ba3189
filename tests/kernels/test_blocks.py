"""Gathering and scattering blocks through the entry points, on a CPU."""

import pytest
import torch

from kernels import ops


@pytest.fixture
def pool():
    return torch.randn(7, 2, 5, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_there_and_back(pool):
    ids = torch.tensor([6, 1, 3])
    staging, target = torch.empty_like(pool[:3]), torch.zeros_like(pool)
    ops.gather_blocks(pool, ids, staging)
    assert torch.equal(staging, pool[ids])
    ops.scatter_blocks(staging, ids, target)
    assert torch.equal(target[ids], pool[ids])
    assert not target[[0, 2, 4, 5]].any()


def test_no_blocks(pool):
    before = pool.clone()
    none = torch.empty(0, dtype=torch.int64)
    ops.gather_blocks(pool, none, pool[:0])
    ops.scatter_blocks(pool[:0], none, pool)
    assert torch.equal(pool, before)


@pytest.mark.parametrize("broken", ["count", "shape", "dtype", "ids", "strides"])
def test_what_does_not_fit_is_a_bug(pool, broken):
    ids, staging = torch.tensor([1, 2]), torch.empty_like(pool[:2])
    staging, ids, pool = {
        "count": (staging[:1], ids, pool),
        "shape": (staging[:, :1].contiguous(), ids, pool),
        "dtype": (staging.float(), ids, pool),
        "ids": (staging, ids.int(), pool),
        "strides": (staging, ids, pool.transpose(1, 2).contiguous().transpose(1, 2)),
    }[broken]
    for call in (
        lambda: ops.gather_blocks(pool, ids, staging),
        lambda: ops.scatter_blocks(staging, ids, pool),
    ):
        with pytest.raises(AssertionError):
            call()
