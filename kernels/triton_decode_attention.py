"""Paged attention for batches of decode steps: one query a sequence, the keys split over programs (flash-decoding).

    keys of a sequence   [ split 0 | split 1 | ... | split n ]     SPLIT_KEYS each, counted from position 0
    _attend_split        one program a (split, KV head, sequence): peak, total and acc of its keys
    _merge_splits        one program a (head, sequence): splits 0, 1, ... n, in tiles of MERGE_TILE

Splits past a sequence's context end at once and are not read again, so a row's result depends on neither the batch
nor how many splits the widest block table makes; with that, the grid is known without a look at the device. Between
this kernel and the prefill kernel, which has no splits, a row's result may differ by rounding.
"""

# Triton compiles annotations of a kernel's arguments, so they have none that mypy could read.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,operator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.layouts import Caches, Ragged
from kernels.triton_attention_keys import MIN_ROWS, attend_keys, key_tile, padded
from kernels.triton_runtime import dot_type

SPLIT_KEYS = 256
MERGE_TILE = 16


def decode_attention(query: Tensor, caches: Caches, ragged: Ragged, scale: float) -> Tensor:
    """query [S, H, D] -> [S, H, D], the query of sequence s at position context_lens[s] - 1. Zeros where that context
    is empty (padding). query_starts is not read."""
    num_seqs, num_heads, head_dim = query.shape
    max_blocks = ragged.block_tables.shape[1]
    group = num_heads // caches.num_kv_heads
    num_splits = triton.cdiv(max_blocks * caches.block_size, SPLIT_KEYS)
    partial = query.new_empty(num_seqs, num_heads, num_splits, head_dim, dtype=torch.float32)
    peaks, totals = query.new_empty(2, num_seqs, num_heads, num_splits, dtype=torch.float32)
    output = torch.empty_like(query)
    _attend_split[(num_splits, caches.num_kv_heads, num_seqs)](
        query,
        caches.k,
        caches.v,
        partial,
        peaks,
        totals,
        ragged.context_lens,
        ragged.block_tables,
        scale,
        max_blocks,
        num_splits,
        caches.k.stride(0),
        caches.k.stride(1),
        num_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded(head_dim),
        BLOCK_SIZE=caches.block_size,
        ROWS=max(MIN_ROWS, triton.next_power_of_2(group)),
        KEYS=key_tile(query.dtype, head_dim),
        SPLIT=SPLIT_KEYS,
        DOT_TYPE=dot_type(query.dtype),
    )
    _merge_splits[(num_heads, num_seqs)](
        partial,
        peaks,
        totals,
        output,
        ragged.context_lens,
        num_splits,
        num_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded(head_dim),
        SPLIT=SPLIT_KEYS,
        TILE=MERGE_TILE,
    )
    return output


@triton.jit(do_not_specialize=["max_blocks", "num_splits"])
def _attend_split(
    query,  # [S, H, D]
    k_cache,  # [num_blocks, Hkv, BLOCK_SIZE, D], strided
    v_cache,  # the same
    partial,  # [S, H, num_splits, D] float32
    peaks,  # [S, H, num_splits] float32
    totals,  # [S, H, num_splits] float32
    context_lens,  # [S] int32
    block_tables,  # [S, max_blocks] int32
    scale,
    max_blocks,
    num_splits,
    block_stride,
    head_stride,
    num_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    """Grid (num_splits, Hkv, S)."""
    split = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    seq = tl.program_id(2).to(tl.int64)
    context_len = tl.load(context_lens + seq)
    begin = split * SPLIT
    if begin >= context_len:
        return

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED_DIM)
    is_row = row < GROUP
    mask = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    head = seq * num_heads + kv_head * GROUP + row
    q = tl.load(query + head[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0).to(DOT_TYPE)
    peak, total, acc = attend_keys(
        q,
        tl.zeros([ROWS], tl.int32) + context_len - 1,
        begin,
        tl.minimum(context_len, begin + SPLIT),
        block_tables + seq * max_blocks,
        k_cache,
        v_cache,
        block_stride,
        kv_head * head_stride,
        scale,
        HEAD_DIM,
        PADDED_DIM,
        BLOCK_SIZE,
        ROWS,
        KEYS,
        DOT_TYPE,
    )
    place = head * num_splits + split
    tl.store(peaks + place, peak, mask=is_row)
    tl.store(totals + place, total, mask=is_row)
    tl.store(partial + place[:, None] * HEAD_DIM + dim[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_splits(
    partial,  # [S, H, num_splits, D] float32
    peaks,  # [S, H, num_splits] float32
    totals,  # [S, H, num_splits] float32
    output,  # [S, H, D]
    context_lens,  # [S] int32
    num_splits,
    num_heads,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (H, S)."""
    seq = tl.program_id(1).to(tl.int64)
    head = seq * num_heads + tl.program_id(0)
    num_used = tl.cdiv(tl.load(context_lens + seq), SPLIT)
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < HEAD_DIM

    peak = float("-inf")
    total = 0.0
    acc = tl.zeros([PADDED_DIM], tl.float32)
    for start in range(0, num_used, TILE):
        split = start + tl.arange(0, TILE)
        is_split = split < num_used
        place = head * num_splits + split
        tile_peaks = tl.load(peaks + place, mask=is_split, other=float("-inf"))
        new_peak = tl.maximum(peak, tl.max(tile_peaks, 0))
        decay = tl.exp(peak - new_peak)
        weights = tl.exp(tile_peaks - new_peak)
        sums = tl.load(totals + place, mask=is_split, other=0.0)
        values = tl.load(
            partial + place[:, None] * HEAD_DIM + dim[None, :],
            mask=is_split[:, None] & is_dim[None, :],
            other=0.0,
        )
        total = total * decay + tl.sum(weights * sums, 0)
        acc = acc * decay + tl.sum(weights[:, None] * values, 0)
        peak = new_peak
    result = acc / tl.where(num_used > 0, total, 1.0)
    tl.store(output + head * HEAD_DIM + dim, result.to(output.dtype.element_ty), mask=is_dim)
