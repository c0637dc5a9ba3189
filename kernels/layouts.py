"""The records that kernels take beside plain tensors. Knows nothing of models or bodies.

KV caches are strided views of one block-major pool: [num_blocks, num_kv_heads, block_size, head_dim], of which the
last two dimensions are contiguous. A block's offset may pass 2^31 elements.
"""

from typing import NamedTuple

import torch
from torch import Tensor

PADDING_SLOT = -1
"""Of a row that only fills a batch up: what it computes is stored nowhere, and over a context of 0 it attends to
nothing. The native CPU bodies, which nobody gives any, do not know such rows."""


class Ragged(NamedTuple):
    """Where each of S sequences' queries and blocks are. The new tokens are the last ones of the context."""

    query_starts: Tensor  # [S+1] int32: sequence s owns query rows query_starts[s]:query_starts[s+1]
    context_lens: Tensor  # [S] int32: cached + new tokens; 0 is padding, as PADDING_SLOT is
    block_tables: Tensor  # [S, max_blocks] int32

    def check(self) -> None:
        num_seqs = self.context_lens.shape[0]
        assert self.query_starts.shape == (num_seqs + 1,) and self.block_tables.shape[0] == num_seqs, self
        assert all(part.dtype is torch.int32 and part.is_contiguous() for part in self), self


class Caches(NamedTuple):
    """One layer's K and V."""

    k: Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]
    v: Tensor  # the same, with the same strides

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def block_size(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3]

    def check(self) -> None:
        assert self.k.shape == self.v.shape and self.k.stride() == self.v.stride(), (
            self.k.shape,
            self.v.shape,
        )
        assert self.k.stride()[2:] == (self.head_dim, 1), self.k.stride()


class Rope(NamedTuple):
    """Rotation of q and k in halves, after an optional RMS norm per head."""

    cos_sin: Tensor  # [context_len, head_dim] float32: head_dim/2 cosines, then as many sines
    q_norm: Tensor | None = None  # [head_dim]
    k_norm: Tensor | None = None  # [head_dim]
    eps: float = 0.0


class TokenSlots(NamedTuple):
    """Where T tokens stand in their sequences and in the cache."""

    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64: block_id * block_size + offset, or PADDING_SLOT


class RowChoices(NamedTuple):
    """What decides R tokens beside their logits."""

    temperatures: Tensor  # [R] float32; 0 is greedy
    top_ks: Tensor  # [R] int64; 0 is no limit
    top_ps: Tensor  # [R] float64; 1 is no limit
    keys: Tensor  # [R] int64, of kernels.gumbel


class Drawn(NamedTuple):
    """A token for each of R rows of logits, and what its probability follows from: the logarithm of a token's is
    logit - peak - log(total)."""

    tokens: Tensor  # [R] int64
    peaks: Tensor  # [R] float32: the largest logit; NaN where a logit is NaN
    totals: Tensor  # [R] float64: the sum of e^(logit - peak); means nothing where the peak is not finite
