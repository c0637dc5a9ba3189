"""The one entry point of each operation. Checks layouts and picks the body by where the tensors are.

Knows nothing of models. Bodies: kernels.reference (plain torch). Matrix products are in kernels.linear.
"""

from torch import Tensor

from kernels import reference
from kernels.layouts import Caches, Ragged, Rope, TokenSlots


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, N], weight [N] -> [T, N]."""
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual [T, N] += x [T, N] in place; returns the norm of the sum."""
    return reference.add_rms_norm(x, residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2I], the gate first -> [T, I]."""
    return reference.silu_mul(gate_up)


def rope_and_cache(qkv: Tensor, rope: Rope, slots: TokenSlots, caches: Caches) -> Tensor:
    """qkv [T, (H + 2 Hkv) D] -> rotated q [T, H, D]; writes rotated k and v to their slots."""
    return reference.rope_and_cache(qkv, rope, slots, caches)


def paged_attention(query: Tensor, caches: Caches, ragged: Ragged, scale: float) -> Tensor:
    """query [T, H, D] -> [T, H, D]: causal attention of every new token over its sequence's cached and new ones.
    Prefill chunks and decode steps mix freely."""
    return reference.paged_attention(query, caches, ragged, scale)
