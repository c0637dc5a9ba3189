"""What the outcomes of a run amount to: latencies, what of it met users' wishes, and goodput. Knows no servers."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.client import Outcome

QUANTILES = (0.5, 0.9, 0.99)
ATTAINMENT = 0.9
GOODPUT = (
    "Goodput (DistServe, OSDI 2024): the highest rate of requests at which at least {attainment:.0%} of them meet "
    "the SLOs. A request meets them when it ended whole, {slo}; one that was refused or failed does not."
)


def quantile(values: Sequence[float], q: float) -> float:
    """Linear between neighbours; 0 without values."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=1000, method="inclusive")[min(int(q * 1000), 999) - 1]


@dataclass(frozen=True, slots=True)
class Slo:
    """What a user wants of a request, in seconds; None is no wish. `per_token_s` bounds a request's mean gap between
    tokens, `gap_s` its worst."""

    first_token_s: float | None = None
    per_token_s: float | None = None
    gap_s: float | None = None
    total_s: float | None = None

    def is_met(self, outcome: Outcome) -> bool:
        told = (outcome.first_token_s, outcome.per_token_s, outcome.worst_gap_s, outcome.took_s)
        wanted = (self.first_token_s, self.per_token_s, self.gap_s, self.total_s)
        return outcome.is_whole and all(
            limit is None or value <= limit for value, limit in zip(told, wanted, strict=True)
        )

    def __str__(self) -> str:
        names = (
            "its first token came within",
            "its mean gap was at most",
            "no gap was longer than",
            "it took at most",
        )
        limits = (self.first_token_s, self.per_token_s, self.gap_s, self.total_s)
        wishes = [
            f"{name} {limit:g} s" for name, limit in zip(names, limits, strict=True) if limit is not None
        ]
        return " and ".join(wishes) or "whenever that was"


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds over many requests or gaps."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Latency":
        mean = sum(values) / len(values) if values else 0.0
        p50, p90, p99 = (quantile(values, q) for q in QUANTILES)
        return cls(mean, p50, p90, p99, max(values, default=0.0))


@dataclass(frozen=True, slots=True)
class Summary:
    """One run. `gap` pools the gaps between chunks of all requests, `worst_gap` has each request's longest;
    `attainment` is the part of all requests that met the SLO, `met_per_s` how many did in a second."""

    num_asked: int
    num_whole: int
    num_refused: int
    num_failed: int
    duration_s: float
    asked_per_s: float
    met_per_s: float
    attainment: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    first_token: Latency
    per_token: Latency
    gap: Latency
    worst_gap: Latency
    total: Latency


LATENCIES = {
    "first_token": "time to first token",
    "per_token": "mean gap of a request",
    "gap": "gaps, all together",
    "worst_gap": "worst gap of a request",
    "total": "whole request",
}


def summarize(outcomes: Sequence[Outcome], slo: Slo, asked_per_s: float | None = None) -> Summary:
    """The run lasted from its first request to its last end. `asked_per_s`: the rate that was planned."""
    whole = [outcome for outcome in outcomes if outcome.is_whole]
    num_refused = sum(outcome.is_refused for outcome in outcomes)
    duration_s = max(outcome.sent_s + outcome.took_s for outcome in outcomes) - min(
        o.sent_s for o in outcomes
    )
    num_met = sum(map(slo.is_met, outcomes))
    several = [outcome for outcome in whole if outcome.num_tokens > 1]
    return Summary(
        num_asked=len(outcomes),
        num_whole=len(whole),
        num_refused=num_refused,
        num_failed=len(outcomes) - len(whole) - num_refused,
        duration_s=duration_s,
        asked_per_s=asked_per_s if asked_per_s is not None else len(outcomes) / duration_s,
        met_per_s=num_met / duration_s,
        attainment=num_met / len(outcomes),
        prompt_tokens_per_s=sum(outcome.num_prompt for outcome in whole) / duration_s,
        output_tokens_per_s=sum(outcome.num_tokens for outcome in whole) / duration_s,
        first_token=Latency.of([outcome.first_token_s for outcome in whole]),
        per_token=Latency.of([outcome.per_token_s for outcome in several]),
        gap=Latency.of([gap for outcome in whole for gap in outcome.gaps_s]),
        worst_gap=Latency.of([outcome.worst_gap_s for outcome in several]),
        total=Latency.of([outcome.took_s for outcome in whole]),
    )


def goodput_per_s(points: Sequence[tuple[float, float]], attainment: float = ATTAINMENT) -> float:
    """The highest rate with that attainment, from (rate, attainment) of several runs: linear between the last rate
    that has it and the next one, and from all at no rate. 0 without points."""
    ordered = sorted(points)
    best = 0.0
    for index, (rate, reached) in enumerate(ordered):
        if reached < attainment:
            below = ordered[index - 1] if index else (0.0, 1.0)
            best = below[0] + (rate - below[0]) * (below[1] - attainment) / (below[1] - reached)
            break
        best = rate
    return best
