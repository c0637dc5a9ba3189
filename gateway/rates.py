"""What went through the gateway lately: a second's counts each, for the last two minutes. Knows nothing of requests.

  ◄──────────────── WINDOW_S ───────────────►
┌────────┬────────┬───  ───┬────────┬────────┐
│ second │ second │  ...   │ second │  now   │  the oldest is overwritten; what is asked for is of whole ones
└────────┴────────┴───  ───┴────────┴────────┘
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from core.clock import Clock, loop_time

WINDOW_S = 120
RATE_S = 5
LATENCY_S = 60
MAX_FLOWS = 256
_SMALLEST_S = 0.0001
_LOG_STEP = math.log(1.1)
Pair = tuple[str, str]


class Spread:
    """Durations as counts on a logarithmic scale: a quantile is right to 5 %, whatever their number."""

    __slots__ = ("_counts",)

    def __init__(self, parts: "Iterable[Spread]" = ()) -> None:
        self._counts: Counter[int] = Counter()
        for part in parts:
            self._counts.update(part._counts)

    def add(self, duration_s: float) -> None:
        step = int(math.log(duration_s / _SMALLEST_S) / _LOG_STEP) if duration_s > _SMALLEST_S else 0
        self._counts[step] += 1

    def quantiles(self) -> "Quantiles":
        ordered = sorted(self._counts.items())
        num = self._counts.total()
        return Quantiles(num, _quantile(ordered, 0.5 * num), _quantile(ordered, 0.99 * num))


def _quantile(ordered: list[tuple[int, int]], rank: float) -> float | None:
    """The middle of the step that holds that rank; None of nothing."""
    seen = 0
    for step, count in ordered:
        seen += count
        if seen >= rank:
            return _SMALLEST_S * math.exp((step + 0.5) * _LOG_STEP)
    return None


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of `num` durations in seconds; None where there was none."""

    num: int
    p50: float | None
    p99: float | None


@dataclass(slots=True)
class Second:
    """What happened between two whole seconds of the gateway's clock. `flows` are KV bytes by the workers that sent
    and took them."""

    at_s: int = -1
    num_arrived: int = 0
    num_ended: int = 0
    num_refused: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    kv_bytes: int = 0
    flows: dict[Pair, int] = field(default_factory=dict)
    first_tokens: Spread = field(default_factory=Spread)
    gaps: Spread = field(default_factory=Spread)
    summary: "tuple[Quantiles, Quantiles] | None" = None

    def quantiles(self) -> tuple[Quantiles, Quantiles]:
        """To first tokens and between tokens; made once, of a second that is over."""
        if self.summary is None:
            self.summary = self.first_tokens.quantiles(), self.gaps.quantiles()
        return self.summary


@dataclass(frozen=True, slots=True)
class History:
    """Second by second, the oldest first. Quantiles are None where nothing was measured."""

    requests: list[int]
    refused: list[int]
    output_tokens: list[int]
    prompt_tokens: list[int]
    kv_bytes: list[int]
    first_token_p50_s: list[float | None]
    first_token_p99_s: list[float | None]
    gap_p50_s: list[float | None]
    gap_p99_s: list[float | None]


@dataclass(frozen=True, slots=True)
class PerSecond:
    """Means over the last `over_s` whole seconds. `requests` ended, `arrivals` began, `refusals` never did."""

    over_s: int
    requests: float
    arrivals: float
    refusals: float
    output_tokens: float
    prompt_tokens: float
    kv_bytes: float


@dataclass(frozen=True, slots=True)
class Latencies:
    """Over the last `over_s` whole seconds: arrival to first token, and from each token to the next, as the client
    took them."""

    over_s: int
    first_token_s: Quantiles
    gap_s: Quantiles


@dataclass(frozen=True, slots=True)
class Flow:
    """KV bytes from one worker to another, a second, over the last RATE_S."""

    prefill_worker_id: str
    decode_worker_id: str
    bytes_per_s: float


class Rates:
    """Counted where it happens, at a constant cost; read by whoever looks."""

    def __init__(self, clock: Clock = loop_time) -> None:
        self._clock = clock
        self._empty = Second()
        self._ring = [Second() for _ in range(WINDOW_S + 1)]

    def now(self) -> Second:
        """The second that it is: what happens is added there."""
        at_s = int(self._clock())
        place = at_s % len(self._ring)
        if self._ring[place].at_s != at_s:
            self._ring[place] = Second(at_s)
        return self._ring[place]

    def flow(self, pair: Pair, num_bytes: int) -> None:
        """KV bytes that crossed. Of one second, pairs beyond MAX_FLOWS count in the sum only."""
        second = self.now()
        second.kv_bytes += num_bytes
        if pair in second.flows or len(second.flows) < MAX_FLOWS:
            second.flows[pair] = second.flows.get(pair, 0) + num_bytes

    def per_second(self) -> PerSecond:
        last = list(self._last(RATE_S))
        return PerSecond(
            RATE_S,
            sum(second.num_ended for second in last) / RATE_S,
            sum(second.num_arrived for second in last) / RATE_S,
            sum(second.num_refused for second in last) / RATE_S,
            sum(second.num_output_tokens for second in last) / RATE_S,
            sum(second.num_prompt_tokens for second in last) / RATE_S,
            sum(second.kv_bytes for second in last) / RATE_S,
        )

    def latencies(self) -> Latencies:
        last = list(self._last(LATENCY_S))
        first_tokens = Spread(second.first_tokens for second in last).quantiles()
        return Latencies(LATENCY_S, first_tokens, Spread(second.gaps for second in last).quantiles())

    def flows(self) -> list[Flow]:
        """The largest first, at most MAX_FLOWS."""
        sums: Counter[Pair] = Counter()
        for second in self._last(RATE_S):
            sums.update(second.flows)
        return [Flow(*pair, num_bytes / RATE_S) for pair, num_bytes in sums.most_common(MAX_FLOWS)]

    def history(self) -> History:
        seconds = list(self._last(WINDOW_S))
        quantiles = [second.quantiles() for second in seconds]
        return History(
            [second.num_ended for second in seconds],
            [second.num_refused for second in seconds],
            [second.num_output_tokens for second in seconds],
            [second.num_prompt_tokens for second in seconds],
            [second.kv_bytes for second in seconds],
            [first.p50 for first, _ in quantiles],
            [first.p99 for first, _ in quantiles],
            [gap.p50 for _, gap in quantiles],
            [gap.p99 for _, gap in quantiles],
        )

    def _last(self, num_seconds: int) -> Iterator[Second]:
        """The whole seconds before this one, the oldest first; empty ones for those in which nothing happened."""
        now_s = int(self._clock())
        for at_s in range(now_s - num_seconds, now_s):
            second = self._ring[at_s % len(self._ring)]
            yield second if second.at_s == at_s else self._empty
