"""The next tokens, as a pure function of (logits, parameters, seed, position). Knows nothing of requests.

A token is drawn by the Gumbel-max rule: the largest of logit / temperature + noise over the allowed tokens, where
the noise is a hash of (seed, position, token id). So a row's token depends neither on its neighbours in the batch
nor on what was drawn before, and equal logits give equal tokens in any process.

Allowed tokens: the top_k largest, then of those the fewest that hold top_p of their probability; tokens that equal
the smallest allowed logit are allowed too, so order never matters.

Rows whose parameters change their logits (engine.logit_rules) are drawn from a changed copy; log-probabilities are
those of the model all the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.sampling import SamplingParams, Top
from core.scores import PromptScore
from engine.logit_edits import apply_edits
from engine.logit_rules import LogitEdits, RuledRow
from kernels import ops
from kernels.gumbel import row_keys
from kernels.layouts import Drawn, RowChoices

GREEDY_BELOW = 1e-5
"""Temperatures below it are greedy: any gap that float32 logits can show would decide anyway."""


class SampledTokens(NamedTuple):
    """One entry a row. Where `is_finite` is False the logits held NaN, +inf or nothing finite, where `is_possible` is
    False the parameters left nothing to draw: the token is 0 then and means nothing. `logprobs` and `tops` are of
    the raw logits (no temperature, limits or penalties); rows that asked for no likeliest tokens have no `tops`."""

    token_ids: npt.NDArray[np.int64]  # [R]
    logprobs: npt.NDArray[np.float32]  # [R]
    is_finite: npt.NDArray[np.bool_]  # [R]
    is_possible: npt.NDArray[np.bool_]  # [R]
    tops: dict[int, Top]


class SamplingRow(NamedTuple):
    """What decides one row's token. `seed` is the choice's; `position` is the index in the output; `ruled` is there
    when params.changes_logits."""

    params: SamplingParams
    seed: int
    position: int
    ruled: RuledRow | None = None


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The rows of a batch as arrays on the host. `edits` are of the rows that `edited` names, in its order."""

    temperatures: npt.NDArray[np.float32]  # [R]; 0 is greedy
    top_ks: npt.NDArray[np.int64]  # [R]; 0 is no limit
    top_ps: npt.NDArray[np.float64]  # [R]; 1 is no limit
    keys: npt.NDArray[np.int64]  # [R]: the hash of (seed, position)
    num_tops: npt.NDArray[np.int64]  # [R]: likeliest tokens to report
    edited: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    edits: LogitEdits | None = None

    @classmethod
    def build(cls, given: Sequence[SamplingRow | tuple[SamplingParams, int, int]]) -> "SamplingBatch":
        rows = [SamplingRow(*row) for row in given]
        temperatures = [0.0 if p.temperature < GREEDY_BELOW else p.temperature for p, *_ in rows]
        seeds = np.array([row.seed & 0xFFFFFFFFFFFFFFFF for row in rows], np.uint64).view(np.int64)
        positions = np.array([row.position for row in rows], np.int64)
        ruled = {index: row.ruled for index, row in enumerate(rows) if row.ruled is not None}
        return cls(
            temperatures=np.array(temperatures, np.float32),
            top_ks=np.array([p.top_k for p, *_ in rows], np.int64),
            top_ps=np.array([p.top_p for p, *_ in rows], np.float64),
            keys=row_keys(torch.from_numpy(seeds), torch.from_numpy(positions)).numpy(),
            num_tops=np.array([p.num_logprobs for p, *_ in rows], np.int64),
            edited=np.array(list(ruled), np.int64),
            edits=LogitEdits.build(list(ruled.values())) if ruled else None,
        )

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def choices(self) -> RowChoices:
        """On the host."""
        arrays = (self.temperatures, self.top_ks, self.top_ps, self.keys)
        return RowChoices(*map(torch.from_numpy, arrays))

    @property
    def plain(self) -> "SamplingBatch":
        """The same rows without edits; those that have some are greedy, which costs least."""
        temperatures = self.temperatures.copy()
        temperatures[self.edited] = 0
        return replace(self, temperatures=temperatures, edited=self.edited[:0], edits=None)

    def take(self, rows: npt.NDArray[np.int64]) -> "SamplingBatch":
        """Those rows, without edits."""
        return SamplingBatch(
            self.temperatures[rows],
            self.top_ks[rows],
            self.top_ps[rows],
            self.keys[rows],
            self.num_tops[rows],
        )


@torch.inference_mode()
def sample(logits: Tensor, requests: SamplingBatch) -> SampledTokens:
    """logits [R, V] float32, not changed; row r belongs to requests' row r."""
    assert logits.shape[0] == len(requests), (logits.shape, len(requests))
    assert logits.dtype is torch.float32, logits.dtype
    logits = logits.contiguous()
    drawn = _choose(logits, requests.plain)
    tokens, is_possible = drawn.tokens, torch.ones_like(drawn.tokens, dtype=torch.bool)
    if requests.edits is not None:
        rows = torch.from_numpy(requests.edited).to(logits.device)
        changed = logits[rows]
        apply_edits(changed, requests.edits)
        redrawn = _choose(changed, requests.take(requests.edited))
        tokens[rows], is_possible[rows] = redrawn.tokens, redrawn.peaks != -torch.inf
    norms = _norms(drawn)
    logprobs = (logits.gather(1, tokens[:, None])[:, 0].double() - norms).float()
    is_finite = torch.isfinite(drawn.peaks)
    return SampledTokens(
        tokens.cpu().numpy(),
        logprobs.cpu().numpy(),
        is_finite.cpu().numpy(),
        (is_possible | ~is_finite).cpu().numpy(),
        likeliest(logits, requests.num_tops, norms),
    )


def likeliest(logits: Tensor, num_tops: npt.NDArray[np.int64], norms: Tensor) -> dict[int, Top]:
    """For each row of logits [R, V] that asks for some: its num_tops likeliest tokens, of equals the lowest first.
    norms [R] float64: the logarithm of each row's sum of e^logit."""
    asking = np.flatnonzero(num_tops)
    if not asking.size:
        return {}
    width = min(int(num_tops.max()), logits.shape[1])
    rows = torch.from_numpy(asking).to(logits.device)
    own = logits if len(asking) == len(logits) else logits[rows]
    values, ids = ops.largest_tokens(own, width)
    logprobs = (values.double() - norms[rows, None]).float()
    pairs = zip(asking.tolist(), ids.tolist(), logprobs.tolist(), strict=True)
    return {
        row: tuple(zip(own_ids[: num_tops[row]], own_logprobs[: num_tops[row]], strict=True))
        for row, own_ids, own_logprobs in pairs
    }


@torch.inference_mode()
def score(logits: Tensor, targets: Sequence[int], num_tops: int) -> list[PromptScore]:
    """Of each target, given the row of logits [R, V] that predicts it."""
    if not targets:
        return []
    greedy = SamplingBatch.build([(SamplingParams(1, 0.0), 0, 0)] * len(targets))
    norms = _norms(_choose(logits, greedy))
    chosen = logits.gather(1, torch.tensor(targets, device=logits.device)[:, None])
    logprobs = (chosen[:, 0].double() - norms).float()
    ranks = (logits > chosen).sum(-1) + 1
    tops = likeliest(logits, np.full(len(targets), num_tops), norms)
    pairs = zip(logprobs.tolist(), ranks.tolist(), strict=True)
    return [PromptScore(logprob, rank, tops.get(row, ())) for row, (logprob, rank) in enumerate(pairs)]


def _norms(drawn: Drawn) -> Tensor:
    return drawn.peaks.double() + drawn.totals.log()


def _choose(logits: Tensor, requests: SamplingBatch) -> Drawn:
    """The tokens of rows without edits."""
    return ops.draw_tokens(logits, RowChoices(*(part.to(logits.device) for part in requests.choices)))
