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


@torch.inference_mode()
def sample(logits: Tensor, requests: SamplingBatch) -> SampledTokens:
    """logits [R, V] float32, not changed; row r belongs to requests' row r."""
    assert logits.shape[0] == len(requests), (logits.shape, len(requests))
    assert logits.dtype is torch.float32, logits.dtype
    logits = logits.contiguous()
    peaks, tokens = logits.max(dim=-1)
    is_valid = torch.isfinite(peaks)
    drawn = np.flatnonzero((requests.temperatures > 0) & is_valid.cpu().numpy())
    if drawn.size:
        rows = torch.from_numpy(drawn).to(logits.device)
        tokens[rows] = _draw(logits[rows], peaks[rows], requests, drawn)
    tokens = torch.where(is_valid, tokens, 0)
    shifted = logits - peaks[:, None]
    chosen = shifted.gather(1, tokens[:, None])[:, 0].double()
    logprobs = (chosen - shifted.exp_().sum(-1, dtype=torch.float64).log()).float()
    return SampledTokens(tokens.cpu().numpy(), logprobs.cpu().numpy(), is_valid.cpu().numpy())


def _draw(logits: Tensor, peaks: Tensor, requests: SamplingBatch, rows: npt.NDArray[np.intp]) -> Tensor:
    """Tokens [r] for the given rows of the batch; logits [r, V] and peaks [r] are already those rows'."""
    device = logits.device
    temperatures = torch.from_numpy(requests.temperatures[rows]).to(device)
    keys = torch.from_numpy(requests.keys[rows]).to(device)
    scaled = (logits - peaks[:, None]) / temperatures[:, None]
    tokens = torch.empty(len(rows), dtype=torch.int64, device=device)
    top_ks, top_ps = requests.top_ks[rows], requests.top_ps[rows]
    is_limited = ((top_ks > 0) & (top_ks < logits.shape[1])) | (top_ps < 1.0)
    free, limited = (torch.from_numpy(np.flatnonzero(mask)).to(device) for mask in (~is_limited, is_limited))
    if free.numel():
        tokens[free] = ops.gumbel_argmax(scaled[free], keys[free])
    if limited.numel():
        ks, ps = (torch.from_numpy(values[is_limited]).to(device) for values in (top_ks, top_ps))
        tokens[limited] = _draw_limited(scaled[limited], ks, ps, keys[limited])
    return tokens


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
