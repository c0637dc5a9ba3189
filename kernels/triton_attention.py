"""Paged attention for GPUs in Triton. Knows nothing of models; kernels.ops asserts the layouts.

A program owns a few query rows of one sequence with all heads that share one KV head, and visits the keys in tiles
counted from position 0, so that a row's result depends on neither the batch nor the chunking.

    program (t, kv)     rows of the tile: (query 0, head 0) (query 0, head 1) ... (query 1, head 0) ...
                        sequence s owns tiles query_starts[s] / QUERIES + s and the next ones, as many as it needs

Bfloat16 products are exact in tensor cores; Triton's interpreter gets them wrong, so under it operands are widened.
"""

# Triton compiles annotations of a kernel's arguments, so they have none that mypy could read.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,operator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.layouts import Caches, Ragged
from kernels.triton_runtime import dot_type

KEY_TILE = 32
MIN_ROWS = 16


def paged_attention(query: Tensor, caches: Caches, ragged: Ragged, scale: float) -> Tensor:
    """query [T, H, D] -> [T, H, D], as kernels.reference."""
    num_tokens, num_heads, head_dim = query.shape
    num_seqs, max_blocks = ragged.block_tables.shape
    group = num_heads // caches.num_kv_heads
    num_rows = max(MIN_ROWS, triton.next_power_of_2(group))
    num_queries = num_rows // group
    output = torch.empty_like(query)
    grid = (num_tokens // num_queries + num_seqs, caches.num_kv_heads)
    _attention[grid](
        query,
        caches.k,
        caches.v,
        output,
        ragged.query_starts,
        ragged.context_lens,
        ragged.block_tables,
        scale,
        num_seqs,
        max_blocks,
        caches.k.stride(0),
        caches.k.stride(1),
        num_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_DIM=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=caches.block_size,
        ROWS=num_rows,
        QUERIES=num_queries,
        KEYS=KEY_TILE,
        DOT_TYPE=dot_type(query.dtype),
    )
    return output


@triton.jit
def _sequence_of(query_starts, tile, num_seqs, QUERIES: tl.constexpr):
    """The last s with query_starts[s] // QUERIES + s <= tile."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // QUERIES + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _attention(
    query,  # [T, H, D]
    k_cache,  # [num_blocks, Hkv, BLOCK_SIZE, D], strided
    v_cache,  # the same
    output,  # [T, H, D]
    query_starts,  # [S+1] int32
    context_lens,  # [S] int32
    block_tables,  # [S, max_blocks] int32
    scale,
    num_seqs,
    max_blocks,
    block_stride,
    head_stride,
    num_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    """Grid (T // QUERIES + S, Hkv)."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    seq = _sequence_of(query_starts, tile, num_seqs, QUERIES)
    seq_start = tl.load(query_starts + seq)
    seq_len = tl.load(query_starts + seq + 1) - seq_start
    first = (tile - (seq_start // QUERIES + seq)) * QUERIES
    if first >= seq_len:
        return
    context_len = tl.load(context_lens + seq)

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED_DIM)
    own = first + row // GROUP
    is_row = (row < QUERIES * GROUP) & (own < seq_len)
    is_dim = dim < HEAD_DIM
    place = (
        (seq_start + own).to(tl.int64) * num_heads * HEAD_DIM + (kv_head * GROUP + row % GROUP) * HEAD_DIM
    )[:, None] + dim[None, :]
    q = tl.load(query + place, mask=is_row[:, None] & is_dim[None, :], other=0.0).to(DOT_TYPE)
    position = context_len - seq_len + own

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    end = tl.minimum(context_len, context_len - seq_len + first + QUERIES)
    for start in range(0, end, KEYS):
        key = start + tl.arange(0, KEYS)
        is_key = key < end
        block = tl.load(
            block_tables + seq.to(tl.int64) * max_blocks + key // BLOCK_SIZE, mask=is_key, other=0
        )
        slot = block.to(tl.int64) * block_stride + kv_head * head_stride + (key % BLOCK_SIZE) * HEAD_DIM
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
    result = acc / total[:, None]
    tl.store(output + place, result.to(output.dtype.element_ty), mask=is_row[:, None] & is_dim[None, :])
