"""The next tokens, as a pure function of (logits, parameters, seed, position). Knows nothing of requests.

A token is drawn by the Gumbel-max rule: the largest of logit / temperature + noise over the allowed tokens, where
the noise is a hash of (seed, position, token id). So a row's token depends neither on its neighbours in the batch
nor on what was drawn before, and equal logits give equal tokens in any process.

Allowed tokens: the top_k largest, then of those the fewest that hold top_p of their probability; tokens that equal
the smallest allowed logit are allowed too, so order never matters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.sampling import SamplingParams
from kernels import ops
from kernels.gumbel import gumbel_choice, row_keys

GREEDY_BELOW = 1e-5
"""Temperatures below it are greedy: any gap that float32 logits can show would decide anyway."""
_FIRST_WIDTH = 256
_WIDTH_STEP = 8


class SampledTokens(NamedTuple):
    """One entry a row. Where `is_valid` is False the logits held NaN, +inf or nothing finite: the token is 0 and
    means nothing. `logprobs` are of the raw logits (no temperature, no limits)."""

    token_ids: npt.NDArray[np.int64]  # [R]
    logprobs: npt.NDArray[np.float32]  # [R]
    is_valid: npt.NDArray[np.bool_]  # [R]


class SamplingRow(NamedTuple):
    """What decides one row's token. `seed` is the choice's; `position` is the index in the output."""

    params: SamplingParams
    seed: int
    position: int


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The rows of a batch as arrays on the host."""

    temperatures: npt.NDArray[np.float32]  # [R]; 0 is greedy
    top_ks: npt.NDArray[np.int64]  # [R]; 0 is no limit
    top_ps: npt.NDArray[np.float64]  # [R]; 1 is no limit
    keys: npt.NDArray[np.int64]  # [R]: the hash of (seed, position)

    @classmethod
    def build(cls, rows: Sequence[SamplingRow | tuple[SamplingParams, int, int]]) -> "SamplingBatch":
        temperatures = [0.0 if p.temperature < GREEDY_BELOW else p.temperature for p, _, _ in rows]
        seeds = np.array([seed & 0xFFFFFFFFFFFFFFFF for _, seed, _ in rows], np.uint64).view(np.int64)
        positions = np.array([position for _, _, position in rows], np.int64)
        return cls(
            temperatures=np.array(temperatures, np.float32),
            top_ks=np.array([p.top_k for p, _, _ in rows], np.int64),
            top_ps=np.array([p.top_p for p, _, _ in rows], np.float64),
            keys=row_keys(torch.from_numpy(seeds), torch.from_numpy(positions)).numpy(),
        )

    def __len__(self) -> int:
        return len(self.keys)

    def is_limited(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """[R]: whether a row is drawn, from fewer tokens than all."""
        has_k = (self.top_ks > 0) & (self.top_ks < vocab_size)
        return (self.temperatures > 0) & (has_k | (self.top_ps < 1.0))


@torch.inference_mode()
def sample(logits: Tensor, requests: SamplingBatch) -> SampledTokens:
    """logits [R, V] float32, not changed; row r belongs to requests' row r."""
    assert logits.shape[0] == len(requests), (logits.shape, len(requests))
    assert logits.dtype is torch.float32, logits.dtype
    logits, device = logits.contiguous(), logits.device
    is_limited = requests.is_limited(logits.shape[1])
    temperatures = np.where(is_limited, np.float32(0), requests.temperatures)
    drawn = ops.draw_tokens(
        logits, torch.from_numpy(temperatures).to(device), torch.from_numpy(requests.keys).to(device)
    )
    tokens, is_valid = drawn.tokens, torch.isfinite(drawn.peaks)
    limited = np.flatnonzero(is_limited & is_valid.cpu().numpy()) if is_limited.any() else []
    if len(limited):
        rows = torch.from_numpy(limited).to(device)
        tokens[rows] = _draw_rows(logits[rows], drawn.peaks[rows], requests, limited)
    chosen = (logits.gather(1, tokens[:, None])[:, 0] - drawn.peaks).double()
    logprobs = (chosen - drawn.totals.log()).float()
    return SampledTokens(tokens.cpu().numpy(), logprobs.cpu().numpy(), is_valid.cpu().numpy())


def _draw_rows(logits: Tensor, peaks: Tensor, requests: SamplingBatch, rows: npt.NDArray[np.intp]) -> Tensor:
    """Tokens [r] for those rows of the batch, each with limits; logits [r, V] and peaks [r] are already theirs."""
    temperatures, top_ks, top_ps, keys = (
        torch.from_numpy(values[rows]).to(logits.device)
        for values in (requests.temperatures, requests.top_ks, requests.top_ps, requests.keys)
    )
    return _draw_limited((logits - peaks[:, None]) / temperatures[:, None], top_ks, top_ps, keys)


def _draw_limited(scaled: Tensor, top_ks: Tensor, top_ps: Tensor, keys: Tensor) -> Tensor:
    """Looks at the largest logits only, and at more of them for the rows where those do not settle it."""
    num_rows, vocab_size = scaled.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=scaled.device)
    pending = torch.arange(num_rows, device=scaled.device)
    width = min(vocab_size, max(_FIRST_WIDTH, int(top_ks.max()) + 1))
    while pending.numel():
        values, ids = scaled[pending].topk(width, dim=-1)
        threshold = _threshold(scaled[pending], values, top_ks[pending], top_ps[pending])
        is_settled = (values[:, -1:] < threshold)[:, 0] | (width == vocab_size)
        allowed = values.masked_fill(values < threshold, -torch.inf)
        settled = pending[is_settled]
        tokens[settled] = gumbel_choice(allowed[is_settled], ids[is_settled], keys[settled])
        pending = pending[~is_settled]
        width = min(vocab_size, width * _WIDTH_STEP)
    return tokens


def _threshold(scaled: Tensor, values: Tensor, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """The smallest allowed value [r, 1], or the smallest of `values` (the largest in order) when it lies beyond."""
    width = values.shape[1]
    has_k = (top_ks > 0) & (top_ks < scaled.shape[1])
    kth = values.gather(1, (top_ks.clamp(1, width) - 1)[:, None])
    kth = torch.where(has_k[:, None], kth, -torch.inf)
    kept = torch.where(values < kth, 0.0, values.exp()).double()
    whole = torch.where(has_k, kept.sum(-1), scaled.exp().sum(-1, dtype=torch.float64))
    num_kept = (kept.cumsum(-1) < (top_ps * whole)[:, None]).sum(-1)
    nucleus = values.gather(1, num_kept.clamp(max=width - 1)[:, None])
    nucleus = torch.where((top_ps < 1.0)[:, None], nucleus, -torch.inf)
    return torch.maximum(kth, nucleus)
