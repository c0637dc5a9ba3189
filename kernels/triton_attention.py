"""Paged attention for GPUs in Triton. Knows nothing of models; kernels.ops asserts the layouts.

Batches of decode steps go to kernels.triton_decode_attention. Here a program owns a few query rows of one sequence
with all heads that share one KV head, and visits the keys in tiles counted from position 0, so that a row's result
depends on neither the batch nor the chunking.

    program (t, kv)     rows of the tile: (query 0, head 0) (query 0, head 1) ... (query 1, head 0) ...
                        sequence s owns tiles query_starts[s] / QUERIES + s and the next ones, as many as it needs
"""

# Triton compiles annotations of a kernel's arguments, so they have none that mypy could read.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,operator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.layouts import Caches, Ragged
from kernels.triton_attention_keys import MIN_ROWS, attend_keys, key_tile, padded
from kernels.triton_decode_attention import decode_attention
from kernels.triton_runtime import dot_type

PREFILL_ROWS = 64
"""Of two-byte types. Float32 has no tensor cores, and four times the operands spill from registers."""


def paged_attention(query: Tensor, caches: Caches, ragged: Ragged, scale: float) -> Tensor:
    """query [T, H, D] -> [T, H, D], as kernels.reference. As many queries as sequences is one query each: known on
    the host, without a look at query_starts."""
    if query.shape[0] == ragged.context_lens.shape[0]:
        return decode_attention(query, caches, ragged, scale)
    return prefill_attention(query, caches, ragged, scale)


def prefill_attention(query: Tensor, caches: Caches, ragged: Ragged, scale: float) -> Tensor:
    """Any lengths: query [T, H, D] -> [T, H, D]. The tile's rows depend on the model alone: another number of them
    might be summed up in another order."""
    num_tokens, num_heads, head_dim = query.shape
    num_seqs, max_blocks = ragged.block_tables.shape
    group = num_heads // caches.num_kv_heads
    fewest = PREFILL_ROWS if query.dtype.itemsize == 2 else MIN_ROWS
    num_rows = max(fewest, triton.next_power_of_2(group))
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
        PADDED_DIM=padded(head_dim),
        BLOCK_SIZE=caches.block_size,
        ROWS=num_rows,
        QUERIES=num_queries,
        KEYS=key_tile(query.dtype, head_dim),
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


@triton.jit(do_not_specialize=["num_seqs", "max_blocks"])
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
    mask = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    place = (
        (seq_start + own).to(tl.int64) * num_heads * HEAD_DIM + (kv_head * GROUP + row % GROUP) * HEAD_DIM
    )[:, None] + dim[None, :]
    q = tl.load(query + place, mask=mask, other=0.0).to(DOT_TYPE)
    position = context_len - seq_len + own
    end = tl.minimum(context_len, context_len - seq_len + first + QUERIES)
    table = block_tables + seq.to(tl.int64) * max_blocks
    _, total, acc = attend_keys(
        q,
        position,
        0,
        end,
        table,
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
    result = acc / total[:, None]
    tl.store(output + place, result.to(output.dtype.element_ty), mask=mask)
