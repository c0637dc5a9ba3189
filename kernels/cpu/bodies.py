"""The native bodies as functions of tensors, with the signatures of kernels.reference. Only where `can_run` says so.

Head sizes that are not whole vectors, or too large for the scratch memory, go to the reference. Rows of every tensor
but the caches are contiguous; the entry points see to that.
"""

from ctypes import byref, c_int64, c_void_p

import torch
from torch import Tensor

from kernels import reference
from kernels.cpu.library import SUFFIXES, AttentionShape, RopeShape, exported, function, native
from kernels.layouts import Caches, Drawn, Ragged, Rope, RowChoices, TokenSlots

LANES = 16
MAX_HEAD_DIM = 512
MAX_GROUP = 64
_DRAW_TOKENS = (*(c_void_p,) * 8, c_int64, c_int64)
_LARGEST_TOKENS = (*(c_void_p,) * 3, c_int64, c_int64, c_int64)


def can_run(x: Tensor) -> bool:
    """Whether there is a native body for tensors like this one on this machine."""
    return x.device.type == "cpu" and x.dtype in SUFFIXES and native() is not None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    output = torch.empty_like(x)
    function("add_rms_norm", x.dtype)(
        None, x.data_ptr(), weight.data_ptr(), output.data_ptr(), x.shape[0], x.shape[1], eps
    )
    return output


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    output = torch.empty_like(x)
    pointers = (x.data_ptr(), residual.data_ptr(), weight.data_ptr(), output.data_ptr())
    function("add_rms_norm", x.dtype)(*pointers, x.shape[0], x.shape[1], eps)
    return output


def silu_mul(gate_up: Tensor) -> Tensor:
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty(num_rows, width)
    function("silu_mul", gate_up.dtype)(gate_up.data_ptr(), output.data_ptr(), num_rows, width)
    return output


def rope_and_cache(qkv: Tensor, rope: Rope, slots: TokenSlots, caches: Caches) -> Tensor:
    num_tokens, num_kv_heads, head_dim = qkv.shape[0], caches.num_kv_heads, caches.head_dim
    if head_dim > MAX_HEAD_DIM:
        return reference.rope_and_cache(qkv, rope, slots, caches)
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    query = qkv.new_empty(num_tokens, num_heads, head_dim)
    strides = (caches.k.stride(0), caches.k.stride(1))
    shape = RopeShape(num_tokens, num_heads, num_kv_heads, head_dim, caches.block_size, *strides)
    function("rope_and_cache", qkv.dtype)(
        qkv.data_ptr(),
        rope.cos_sin.data_ptr(),
        slots.positions.data_ptr(),
        slots.slot_mapping.data_ptr(),
        None if rope.q_norm is None else rope.q_norm.data_ptr(),
        None if rope.k_norm is None else rope.k_norm.data_ptr(),
        rope.eps,
        query.data_ptr(),
        caches.k.data_ptr(),
        caches.v.data_ptr(),
        byref(shape),
    )
    return query


def paged_attention(query: Tensor, caches: Caches, ragged: Ragged, scale: float) -> Tensor:
    head_dim, group = caches.head_dim, query.shape[1] // caches.num_kv_heads
    if head_dim % LANES != 0 or head_dim > MAX_HEAD_DIM or group > MAX_GROUP:
        return reference.paged_attention(query, caches, ragged, scale)
    output = torch.empty_like(query)
    num_seqs, max_blocks = ragged.block_tables.shape
    strides = (caches.k.stride(0), caches.k.stride(1))
    heads = (query.shape[1], caches.num_kv_heads, head_dim)
    shape = AttentionShape(num_seqs, *heads, caches.block_size, max_blocks, *strides, scale)
    function("attention", query.dtype)(
        query.data_ptr(),
        caches.k.data_ptr(),
        caches.v.data_ptr(),
        ragged.query_starts.data_ptr(),
        ragged.context_lens.data_ptr(),
        ragged.block_tables.data_ptr(),
        output.data_ptr(),
        byref(shape),
    )
    return output


def draw_tokens(logits: Tensor, choices: RowChoices) -> Drawn:
    num_rows, width = logits.shape
    tokens, peaks = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows)
    totals = torch.empty(num_rows, dtype=torch.float64)
    tensors = (logits, *choices, tokens, peaks, totals)
    exported("draw_tokens", _DRAW_TOKENS)(*(each.data_ptr() for each in tensors), num_rows, width)
    return Drawn(tokens, peaks, totals)


def largest_tokens(logits: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    num_rows, width = logits.shape
    values, ids = torch.empty(num_rows, num_tokens), torch.empty(num_rows, num_tokens, dtype=torch.int64)
    tensors = (logits, values, ids)
    exported("largest_tokens", _LARGEST_TOKENS)(
        *(each.data_ptr() for each in tensors), num_rows, width, num_tokens
    )
    return values, ids
