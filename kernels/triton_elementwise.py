"""Norms, gates, rotation and the cache write for GPUs in Triton. Knows nothing of models.

Signatures are those of kernels.reference; kernels.ops asserts the layouts. All arithmetic is in float32.
"""

# Triton compiles annotations of a kernel's arguments, so they have none that mypy could read.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,operator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.layouts import Caches, Rope, TokenSlots

SILU_BLOCK = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    output = torch.empty_like(x)
    width = triton.next_power_of_2(x.shape[1])
    _rms_norm[(x.shape[0],)](x, x, weight, output, x.shape[1], eps, WIDTH=width, ADD=False)
    return output


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    output = torch.empty_like(x)
    width = triton.next_power_of_2(x.shape[1])
    _rms_norm[(x.shape[0],)](x, residual, weight, output, x.shape[1], eps, WIDTH=width, ADD=True)
    return output


def silu_mul(gate_up: Tensor) -> Tensor:
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty(num_rows, width)
    _silu_mul[(num_rows, triton.cdiv(width, SILU_BLOCK))](gate_up, output, width, BLOCK=SILU_BLOCK)
    return output


def rope_and_cache(qkv: Tensor, rope: Rope, slots: TokenSlots, caches: Caches) -> Tensor:
    num_tokens, num_kv_heads, head_dim = qkv.shape[0], caches.num_kv_heads, caches.head_dim
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    query = qkv.new_empty(num_tokens, num_heads, head_dim)
    _rope_and_cache[(num_tokens, num_heads + 2 * num_kv_heads)](
        qkv,
        rope.cos_sin,
        slots.positions,
        slots.slot_mapping,
        qkv if rope.q_norm is None else rope.q_norm,
        qkv if rope.k_norm is None else rope.k_norm,
        query,
        caches.k,
        caches.v,
        caches.k.stride(0),
        caches.k.stride(1),
        rope.eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        PADDED_HALF=triton.next_power_of_2(head_dim // 2),
        BLOCK_SIZE=caches.block_size,
        HAS_NORM=rope.q_norm is not None,
    )
    return query


@triton.jit
def _rms_norm(
    x,  # [T, N]
    residual,  # [T, N]; with ADD it becomes residual + x, else it is x itself
    weight,  # [N]
    output,  # [T, N]
    num_columns,
    eps,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
):
    """Grid (T,)."""
    row = tl.program_id(0).to(tl.int64) * num_columns
    column = tl.arange(0, WIDTH)
    mask = column < num_columns
    value = tl.load(residual + row + column, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(x + row + column, mask=mask, other=0.0).to(tl.float32)
        narrow = value.to(residual.dtype.element_ty)
        tl.store(residual + row + column, narrow, mask=mask)
        value = narrow.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / num_columns + eps)
    scaled = value * scale * tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + row + column, scaled.to(output.dtype.element_ty), mask=mask)


@triton.jit
def _silu_mul(
    gate_up,  # [T, 2 * width]
    output,  # [T, width]
    width,
    BLOCK: tl.constexpr,
):
    """Grid (T, cdiv(width, BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=mask, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(output + row * width + column, result.to(output.dtype.element_ty), mask=mask)


@triton.jit
def _either(a, b, is_a, mask):
    """What lies at `a` where is_a, at `b` elsewhere."""
    from_a = tl.load(a, mask=mask & is_a, other=0.0).to(tl.float32)
    from_b = tl.load(b, mask=mask & ~is_a, other=0.0).to(tl.float32)
    return from_a + from_b


@triton.jit
def _rope_and_cache(
    qkv,  # [T, (NUM_HEADS + 2 NUM_KV_HEADS) * 2 HALF]
    cos_sin,  # [context_len, 2 HALF] float32
    positions,  # [T] int64
    slot_mapping,  # [T] int64; K and V of a negative slot are stored nowhere
    q_norm,  # [2 HALF], read with HAS_NORM only
    k_norm,  # [2 HALF]
    query,  # [T, NUM_HEADS, 2 HALF]
    k_cache,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, 2 HALF], strided
    v_cache,  # the same
    block_stride,
    head_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> None:
    """Grid (T, NUM_HEADS + 2 NUM_KV_HEADS): one head of q, k or v each."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, PADDED_HALF)
    mask = dim < HALF
    source = qkv + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * 2 * HALF + dim
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    slot = tl.load(slot_mapping + token)
    is_kept = mask & (slot >= 0)
    kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
    place = slot // BLOCK_SIZE * block_stride + kv_head * head_stride + slot % BLOCK_SIZE * 2 * HALF + dim
    kind = k_cache.dtype.element_ty
    if head >= NUM_HEADS + NUM_KV_HEADS:
        tl.store(v_cache + place, low.to(kind), mask=is_kept)
        tl.store(v_cache + place + HALF, high.to(kind), mask=is_kept)
        return
    if HAS_NORM:
        scale = 1.0 / tl.sqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / (2 * HALF) + eps)
        is_query = dim * 0 + head < NUM_HEADS
        low *= scale * _either(q_norm + dim, k_norm + dim, is_query, mask)
        high *= scale * _either(q_norm + HALF + dim, k_norm + HALF + dim, is_query, mask)
    angles = cos_sin + tl.load(positions + token) * 2 * HALF + dim
    cosine = tl.load(angles, mask=mask, other=0.0)
    sine = tl.load(angles + HALF, mask=mask, other=0.0)
    rotated_low = low * cosine - high * sine
    rotated_high = high * cosine + low * sine
    if head < NUM_HEADS:
        target = query + (token * NUM_HEADS + head) * 2 * HALF + dim
        tl.store(target, rotated_low.to(query.dtype.element_ty), mask=mask)
        tl.store(target + HALF, rotated_high.to(query.dtype.element_ty), mask=mask)
    else:
        tl.store(k_cache + place, rotated_low.to(kind), mask=is_kept)
        tl.store(k_cache + place + HALF, rotated_high.to(kind), mask=is_kept)
