"""Random cases for every kernel's bodies, odd shapes included."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kernels.layouts import Caches, Ragged, Rope, TokenSlots


class AttentionCase(NamedTuple):
    query: Tensor
    caches: Caches
    ragged: Ragged
    scale: float


class RopeCase(NamedTuple):
    qkv: Tensor
    rope: Rope
    slots: TokenSlots
    caches: Caches


Lens = Sequence[tuple[int, int]]
"""(cached, new) tokens of each sequence."""


def make_caches(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> Caches:
    """Layer 1 of a pool of three; what no test writes is NaN, as a failed request may leave it."""
    pool = torch.full((num_blocks, 3, 2, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    return Caches(pool[:, 1, 0], pool[:, 1, 1])


def make_attention(
    lens: Lens,
    heads: tuple[int, int] = (9, 3),
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> AttentionCase:
    """Blocks lie scattered in the pool; slots past each context are NaN."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    context_lens = [cached + new for cached, new in lens]
    counts = [-(-context // block_size) for context in context_lens]
    order = torch.randperm(sum(counts) + 3, generator=generator).int()
    caches = make_caches(len(order), num_kv_heads, block_size, head_dim, dtype)
    tables = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    taken = 0
    for seq, (context, count) in enumerate(zip(context_lens, counts, strict=True)):
        tables[seq, :count] = order[taken : taken + count]
        taken += count
        places = torch.arange(context)
        blocks, offsets = tables[seq, places // block_size].long(), places % block_size
        for cache in caches:
            cache[blocks, :, offsets] = torch.randn(context, num_kv_heads, head_dim, generator=generator).to(
                dtype
            )
    starts = torch.tensor([0, *(new for _, new in lens)]).cumsum(0).int()
    query = torch.randn(int(starts[-1]), num_heads, head_dim, generator=generator).to(dtype)
    ragged = Ragged(starts, torch.tensor(context_lens, dtype=torch.int32), tables)
    return AttentionCase(query, caches, ragged, head_dim**-0.5)


def make_rope(
    num_tokens: int,
    heads: tuple[int, int] = (9, 3),
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    has_norm: bool = False,
    seed: int = 0,
) -> RopeCase:
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    num_blocks, block_size = num_tokens // 8 + 2, 16
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens]
    positions = torch.randint(0, 500, (num_tokens,), generator=generator)
    angles = torch.rand(500, head_dim // 2, generator=generator) * 6
    norms = [(1 + torch.randn(head_dim, generator=generator) / 4).to(dtype) for _ in range(2)]
    rope = Rope(torch.cat((angles.cos(), angles.sin()), -1), *(norms if has_norm else (None, None)), 1e-5)
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator).to(dtype)
    caches = make_caches(num_blocks, num_kv_heads, block_size, head_dim, dtype)
    return RopeCase(qkv, rope, TokenSlots(positions, slots), caches)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """As close as one rounding of the type after float32 arithmetic; NaN only where expected."""
    tolerance = 2e-5 if expected.dtype is torch.float32 else 1.6e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.fixture(scope="session")
def attention_case() -> Callable[..., AttentionCase]:
    return make_attention


@pytest.fixture(scope="session")
def rope_case() -> Callable[..., RopeCase]:
    return make_rope


@pytest.fixture(scope="session")
def near() -> Callable[[Tensor, Tensor], None]:
    return assert_near
