"""The one entry point of each operation. Checks layouts and picks the body by where the tensors are.

Knows nothing of models. Bodies: kernels.triton_bodies (GPU tensors), kernels.cpu.bodies (native, on a CPU), else
kernels.reference (plain torch). Matrix products are in kernels.linear.
"""

from typing import Protocol

import torch
from torch import Tensor

from kernels import reference
from kernels.cpu import bodies as native
from kernels.layouts import Caches, Drawn, Ragged, Rope, RowChoices, TokenSlots


class Bodies(Protocol):
    """What each of the modules offers: every operation of this one, without its checks."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def silu_mul(self, gate_up: Tensor) -> Tensor: ...
    def rope_and_cache(self, qkv: Tensor, rope: Rope, slots: TokenSlots, caches: Caches) -> Tensor: ...
    def paged_attention(self, query: Tensor, caches: Caches, ragged: Ragged, scale: float) -> Tensor: ...
    def draw_tokens(self, logits: Tensor, choices: RowChoices) -> Drawn: ...
    def largest_tokens(self, logits: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]: ...


def bodies_for(x: Tensor) -> Bodies:
    """Triton is imported when the first GPU tensor comes."""
    if x.is_cuda:
        from kernels import triton_bodies

        return triton_bodies
    return native if native.can_run(x) else reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, N], weight [N] -> [T, N]."""
    assert x.is_contiguous() and weight.shape == x.shape[1:], (x.shape, weight.shape)
    assert weight.dtype is x.dtype, (weight.dtype, x.dtype)
    return bodies_for(x).rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual [T, N] += x [T, N] in place; returns the norm of the sum."""
    assert x.is_contiguous() and residual.is_contiguous(), (x.stride(), residual.stride())
    assert x.shape == residual.shape and weight.shape == x.shape[1:], (x.shape, residual.shape, weight.shape)
    assert weight.dtype is x.dtype and residual.dtype is x.dtype, (weight.dtype, residual.dtype, x.dtype)
    return bodies_for(x).add_rms_norm(x, residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2I], the gate first -> [T, I]."""
    assert gate_up.is_contiguous() and gate_up.shape[1] % 2 == 0, gate_up.shape
    return bodies_for(gate_up).silu_mul(gate_up)


def rope_and_cache(qkv: Tensor, rope: Rope, slots: TokenSlots, caches: Caches) -> Tensor:
    """qkv [T, (H + 2 Hkv) D] -> rotated q [T, H, D]; writes rotated k and v to their slots."""
    caches.check()
    head_dim = caches.head_dim
    assert qkv.is_contiguous() and qkv.shape[1] % head_dim == 0, (qkv.shape, head_dim)
    assert caches.k.dtype is qkv.dtype, (caches.k.dtype, qkv.dtype)
    assert rope.cos_sin.dtype is torch.float32 and rope.cos_sin.shape[1] == head_dim, rope.cos_sin.shape
    assert slots.positions.dtype is torch.int64 and slots.slot_mapping.dtype is torch.int64, slots
    return bodies_for(qkv).rope_and_cache(qkv, rope, slots, caches)


def paged_attention(query: Tensor, caches: Caches, ragged: Ragged, scale: float) -> Tensor:
    """query [T, H, D] -> [T, H, D]: causal attention of every new token over its sequence's cached and new ones.
    Prefill chunks and decode steps mix freely."""
    caches.check()
    ragged.check()
    assert query.is_contiguous() and query.shape[2] == caches.head_dim, (query.shape, caches.head_dim)
    assert query.shape[1] % caches.num_kv_heads == 0, (query.shape, caches.num_kv_heads)
    assert caches.k.dtype is query.dtype, (caches.k.dtype, query.dtype)
    return bodies_for(query).paged_attention(query, caches, ragged, scale)


def draw_tokens(logits: Tensor, choices: RowChoices) -> Drawn:
    """logits [R, V] float32 -> for each row the token with the largest (logit - peak) / temperature + noise
    (kernels.gumbel), the lowest of equals, or at temperature 0 the largest logit; 0 where the peak is not finite.
    Drawn are only the top_k largest, and of those the fewest that hold top_p of their probability; what equals the
    smallest of them too."""
    _check_choices(logits, choices)
    return bodies_for(logits).draw_tokens(logits, choices)


def largest_tokens(logits: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """logits [R, V] float32 -> values and ids int64, both [R, num_tokens]: the largest in order, of equals the lowest
    ids first."""
    assert logits.is_contiguous() and logits.dtype is torch.float32, (logits.stride(), logits.dtype)
    assert 0 < num_tokens <= logits.shape[1], (num_tokens, logits.shape)
    return bodies_for(logits).largest_tokens(logits, num_tokens)


def _check_choices(logits: Tensor, choices: RowChoices) -> None:
    assert logits.is_contiguous() and logits.dtype is torch.float32, (logits.stride(), logits.dtype)
    dtypes = (torch.float32, torch.int64, torch.float64, torch.int64)
    assert tuple(part.dtype for part in choices) == dtypes, choices
    assert all(part.shape == logits.shape[:1] and part.is_contiguous() for part in choices), choices


def sample_packed(logits: Tensor, choices: RowChoices) -> Tensor:
    """logits [R, V] float32 -> [3, R] int32: the tokens, the bits of their float32 log-probabilities, and 1 where the
    row was finite. Where it was not, the token is 0. For GPU tensors; its twin on a CPU is engine.sampler."""
    from kernels import triton_sampling

    _check_choices(logits, choices)
    return triton_sampling.sample_packed(logits, choices)


def gather_blocks(pool: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """staging[i] = pool[block_ids[i]]: pool [num_blocks, ...], block_ids [n] int64, staging [n, ...]; all on one
    device, where the ids are not checked."""
    _check_blocks(pool, block_ids, staging)
    if pool.is_cuda:
        from kernels import triton_blocks

        triton_blocks.gather_blocks(pool, block_ids, staging)
    else:
        reference.gather_blocks(pool, block_ids, staging)


def scatter_blocks(staging: Tensor, block_ids: Tensor, pool: Tensor) -> None:
    """pool[block_ids[i]] = staging[i], the way back: no id may occur twice."""
    _check_blocks(pool, block_ids, staging)
    if pool.is_cuda:
        from kernels import triton_blocks

        triton_blocks.scatter_blocks(staging, block_ids, pool)
    else:
        reference.scatter_blocks(staging, block_ids, pool)


def _check_blocks(pool: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    assert pool.is_contiguous() and staging.is_contiguous(), (pool.stride(), staging.stride())
    assert staging.shape == (*block_ids.shape, *pool.shape[1:]), (staging.shape, block_ids.shape, pool.shape)
    assert staging.dtype is pool.dtype and block_ids.dtype is torch.int64, (staging.dtype, block_ids.dtype)
    assert pool.device == block_ids.device == staging.device, (pool.device, block_ids.device, staging.device)
    assert block_ids.ndim == 1 and block_ids.is_contiguous(), block_ids
