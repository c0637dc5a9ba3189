"""The one entry point of each operation. Checks layouts and picks the body by where the tensors are.

Knows nothing of models. Bodies: kernels.reference (plain torch), kernels.cpu.bodies (native). Matrix products are in
kernels.linear.
"""

import torch
from torch import Tensor

from kernels import reference
from kernels.cpu import bodies as native
from kernels.layouts import Caches, Ragged, Rope, TokenSlots


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, N], weight [N] -> [T, N]."""
    assert x.is_contiguous() and weight.dtype is x.dtype and weight.shape == x.shape[1:], (
        x.shape,
        weight.shape,
    )
    if native.can_run(x):
        return native.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual [T, N] += x [T, N] in place; returns the norm of the sum."""
    assert x.is_contiguous() and residual.is_contiguous() and x.shape == residual.shape, (
        x.shape,
        residual.shape,
    )
    assert weight.dtype is x.dtype and residual.dtype is x.dtype, (weight.dtype, residual.dtype, x.dtype)
    if native.can_run(x):
        return native.add_rms_norm(x, residual, weight, eps)
    return reference.add_rms_norm(x, residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2I], the gate first -> [T, I]."""
    assert gate_up.is_contiguous() and gate_up.shape[1] % 2 == 0, gate_up.shape
    if native.can_run(gate_up):
        return native.silu_mul(gate_up)
    return reference.silu_mul(gate_up)


def rope_and_cache(qkv: Tensor, rope: Rope, slots: TokenSlots, caches: Caches) -> Tensor:
    """qkv [T, (H + 2 Hkv) D] -> rotated q [T, H, D]; writes rotated k and v to their slots."""
    caches.check()
    assert qkv.is_contiguous() and qkv.shape[1] % caches.head_dim == 0, (qkv.shape, caches.head_dim)
    assert rope.cos_sin.dtype is torch.float32 and rope.cos_sin.shape[1] == caches.head_dim, (
        rope.cos_sin.shape
    )
    assert slots.positions.dtype is torch.int64 and slots.slot_mapping.dtype is torch.int64, slots
    if native.can_rotate(qkv, caches):
        return native.rope_and_cache(qkv, rope, slots, caches)
    return reference.rope_and_cache(qkv, rope, slots, caches)


def paged_attention(query: Tensor, caches: Caches, ragged: Ragged, scale: float) -> Tensor:
    """query [T, H, D] -> [T, H, D]: causal attention of every new token over its sequence's cached and new ones.
    Prefill chunks and decode steps mix freely."""
    caches.check()
    ragged.check()
    assert query.is_contiguous() and query.shape[2] == caches.head_dim, (query.shape, caches.head_dim)
    assert query.shape[1] % caches.num_kv_heads == 0, (query.shape, caches.num_kv_heads)
    return (native if native.can_attend(query, caches) else reference).paged_attention(
        query, caches, ragged, scale
    )
