"""What becomes of each simulated request, and all of them together. Knows nothing of workers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.client import Outcome
from bench.summary import QUANTILES, Latency, Slo, Summary
from core.ids import BlockHash
from core.sampling import SamplingParams

BINS_PER_E = 100
"""Of the histogram of gaps: a bin is one percent wide."""
MAX_NEW = 100_000
SHORTEST_S = 1e-7


@dataclass(slots=True)
class Asked:
    """One request on its way. Moments in seconds of simulated time; `last_s` is that of its latest token."""

    index: int
    at_s: float
    num_prompt: int
    params: SamplingParams
    chain: list[BlockHash] = field(default_factory=list)
    first_s: float = -1.0
    last_s: float = -1.0
    worst_gap_s: float = 0.0
    num_tokens: int = 0
    is_refused: bool = False
    is_local: bool = False

    @property
    def is_whole(self) -> bool:
        return self.num_tokens == self.params.max_tokens


class Gaps:
    """The gaps of all requests together, to one percent: they are too many to be kept."""

    def __init__(self) -> None:
        self._new_s: list[float] = []
        self._new_counts: list[int] = []
        self._counts: dict[int, int] = {}
        self._sum_s = 0.0
        self._max_s = 0.0

    def add(self, gap_s: float, count: int = 1) -> None:
        self._new_s.append(gap_s)
        self._new_counts.append(count)
        if len(self._new_s) >= MAX_NEW:
            self._sort_in()

    def _sort_in(self) -> None:
        gaps, counts = np.maximum(np.array(self._new_s), SHORTEST_S), np.array(self._new_counts)
        bins, where = np.unique(np.round(np.log(gaps) * BINS_PER_E).astype(int), return_inverse=True)
        for bin_, count in zip(bins.tolist(), np.bincount(where, counts).tolist(), strict=True):
            self._counts[bin_] = self._counts.get(bin_, 0) + int(count)
        self._sum_s += float(gaps @ counts)
        self._max_s = max(self._max_s, float(gaps.max()))
        self._new_s, self._new_counts = [], []

    def latency(self) -> Latency:
        if self._new_s:
            self._sort_in()
        num_gaps = sum(self._counts.values())
        mean = self._sum_s / num_gaps if num_gaps else 0.0
        p50, p90, p99 = (self._quantile(q * num_gaps) for q in QUANTILES)
        return Latency(mean, p50, p90, p99, self._max_s)

    def _quantile(self, rank: float) -> float:
        for bin_ in sorted(self._counts):
            rank -= self._counts[bin_]
            if rank <= 0:
                return math.exp(bin_ / BINS_PER_E)
        return self._max_s


def outcome_of(asked: Asked) -> Outcome:
    """As a client would have noted it, its gaps being equal: only their mean and the worst are known."""
    outcome = Outcome(sent_s=asked.at_s, num_prompt=asked.num_prompt, num_tokens=asked.num_tokens)
    outcome.status = 429 if asked.is_refused else 200
    outcome.is_whole = asked.is_whole
    if asked.is_whole:
        outcome.first_token_s, outcome.took_s = asked.first_s - asked.at_s, asked.last_s - asked.at_s
        num_gaps = asked.num_tokens - 1
        outcome.gaps_s = [(asked.last_s - asked.first_s) / num_gaps] * num_gaps if num_gaps else []
    return outcome


def summarize(requests: Sequence[Asked], gaps: Gaps, slo: Slo, asked_per_s: float | None = None) -> Summary:
    """What `bench.summary.summarize` says of a real run."""
    whole = [asked for asked in requests if asked.is_whole]
    num_refused = sum(asked.is_refused for asked in requests)
    end_s = max((asked.last_s for asked in whole), default=0.0)
    duration_s = max(end_s - min(asked.at_s for asked in requests), 1e-9)
    several = [asked for asked in whole if asked.num_tokens > 1]
    num_met = sum(_is_met(asked, slo) for asked in whole)
    return Summary(
        num_asked=len(requests),
        num_whole=len(whole),
        num_refused=num_refused,
        num_failed=len(requests) - len(whole) - num_refused,
        duration_s=duration_s,
        asked_per_s=asked_per_s if asked_per_s is not None else len(requests) / duration_s,
        met_per_s=num_met / duration_s,
        attainment=num_met / len(requests),
        prompt_tokens_per_s=sum(asked.num_prompt for asked in whole) / duration_s,
        output_tokens_per_s=sum(asked.num_tokens for asked in whole) / duration_s,
        first_token=Latency.of([asked.first_s - asked.at_s for asked in whole]),
        per_token=Latency.of([_per_token_s(asked) for asked in several]),
        gap=gaps.latency(),
        worst_gap=Latency.of([asked.worst_gap_s for asked in several]),
        total=Latency.of([asked.last_s - asked.at_s for asked in whole]),
    )


def _per_token_s(asked: Asked) -> float:
    return (asked.last_s - asked.first_s) / (asked.num_tokens - 1) if asked.num_tokens > 1 else 0.0


def _is_met(asked: Asked, slo: Slo) -> bool:
    limits = (slo.first_token_s, slo.per_token_s, slo.gap_s, slo.total_s)
    told = (asked.first_s - asked.at_s, _per_token_s(asked), asked.worst_gap_s, asked.last_s - asked.at_s)
    return all(limit is None or value <= limit for value, limit in zip(told, limits, strict=True))
