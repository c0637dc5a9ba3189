"""Randomness as a function: Gumbel noise hashed from (key, token id), in torch. Knows nothing of sampling rules.

The hash is splitmix64's finaliser (Steele, Lea and Flood, 2014) on wrapping 64-bit integers, so any process, batch
and device sees the same noise up to the rounding of two logarithms.
"""

import torch
from torch import Tensor

_GOLDEN = -0x61C8864680B583EB
_MIX_1, _MIX_2 = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_POSITION_STEP = -0x2E4AB5CD2E6D12FD


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """One 64-bit key for each (seed, position); all int64 [R]."""
    return _mix(_mix(seeds + _GOLDEN) + positions * _POSITION_STEP)


def gumbel_noise(ids: Tensor, keys: Tensor) -> Tensor:
    """-log(-log(u)), u uniform in (0, 1): ids [R, n] int64, keys [R] -> [R, n] float32. The 32 hashed bits are 1 - u,
    so that the upper tail, where winners come from, is fine."""
    bits = (_mix(keys[:, None] + ids * _GOLDEN) >> 32) & 0xFFFFFFFF
    complement = ((bits.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return complement.neg_().log1p_().neg_().log_().neg_()


def gumbel_choice(scaled: Tensor, ids: Tensor, keys: Tensor) -> Tensor:
    """The id [R] of the largest scaled + noise in each row, the lowest id of equals. scaled [R, n], ids [R, n]."""
    scores = scaled + gumbel_noise(ids, keys)
    best = scores.amax(-1, keepdim=True)
    return ids.masked_fill(scores < best, torch.iinfo(torch.int64).max).amin(-1)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _MIX_1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return z ^ ((z >> 31) & 0x1FFFFFFFF)
