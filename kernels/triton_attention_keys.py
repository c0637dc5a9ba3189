"""The part that attention's Triton kernels share: a run of keys, visited tile by tile with a running softmax.

Bfloat16 products are exact in tensor cores; Triton's interpreter gets them wrong, so under it operands are widened.
"""

# Triton compiles annotations of a kernel's arguments, so they have none that mypy could read.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,operator"

import torch
import triton
import triton.language as tl

MIN_ROWS = 16
"""The fewest rows of a product on tensor cores."""
TILE_BYTES = 16384


def padded(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())


def key_tile(dtype: torch.dtype, head_dim: int) -> int:
    """Keys a tile: as many as a program can hold K and V of in shared memory and registers."""
    return min(128, TILE_BYTES // padded(head_dim)) // dtype.itemsize


@triton.jit
def attend_keys(
    q,  # [ROWS, PADDED_DIM]
    position,  # [ROWS] int32: the last key that a row sees
    begin,
    end,
    table,  # one sequence's blocks, int32
    k_cache,  # [num_blocks, Hkv, BLOCK_SIZE, HEAD_DIM], strided
    v_cache,  # the same
    block_stride,
    head_offset,  # int64: where the KV head lies in a block
    scale,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    """Keys begin:end in tiles of KEYS from `begin` on -> the largest score [ROWS], the weights' sum [ROWS] and the
    weighted values [ROWS, PADDED_DIM], both relative to that score."""
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < HEAD_DIM
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        is_key = key < end
        block = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0)
        slot = block.to(tl.int64) * block_stride + head_offset + (key % BLOCK_SIZE) * HEAD_DIM
        k = tl.load(k_cache + slot[None, :] + dim[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0)
        scores = tl.dot(q, k.to(DOT_TYPE), input_precision="ieee") * scale
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        decay = tl.exp(peak - new_peak)
        weights = tl.exp(scores - new_peak[:, None])
        v = tl.load(v_cache + slot[:, None] + dim[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        acc += tl.dot(weights.to(DOT_TYPE), v.to(DOT_TYPE), input_precision="ieee")
        peak = new_peak
    return peak, total, acc
