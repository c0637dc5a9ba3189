"""Blocks of a pool to and from one contiguous run on a GPU, in one launch each. Knows nothing of what a block holds.

    pool       [ . 1 . . 4 . 2 ]     gather: block_ids [1, 4, 2]
    staging    [ 1 4 2 ]             scatter: the other way

What is copied is bits: elements are read as integers of their size.
"""

# Triton compiles annotations of a kernel's arguments, so they have none that mypy could read.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,operator"

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def gather_blocks(pool: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    _launch(pool, block_ids, staging, gathers=True)


def scatter_blocks(staging: Tensor, block_ids: Tensor, pool: Tensor) -> None:
    _launch(pool, block_ids, staging, gathers=False)


def _launch(pool: Tensor, block_ids: Tensor, staging: Tensor, gathers: bool) -> None:
    integer = _INTEGERS[pool.dtype.itemsize]
    width = pool[0].numel()
    _copy_blocks[(triton.cdiv(width, CHUNK), block_ids.shape[0])](
        pool.view(integer), block_ids, staging.view(integer), width, CHUNK=CHUNK, GATHERS=gathers
    )


@triton.jit
def _copy_blocks(
    pool,  # [num_blocks, width]
    block_ids,  # [n] int64
    staging,  # [n, width]
    width,
    CHUNK: tl.constexpr,
    GATHERS: tl.constexpr,
):
    """Grid (cdiv(width, CHUNK), n)."""
    place = tl.program_id(1).to(tl.int64)
    element = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    mask = element < width
    in_pool = pool + tl.load(block_ids + place) * width + element
    in_staging = staging + place * width + element
    if GATHERS:
        tl.store(in_staging, tl.load(in_pool, mask=mask), mask=mask)
    else:
        tl.store(in_pool, tl.load(in_staging, mask=mask), mask=mask)
