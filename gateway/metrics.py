"""The gateway's own measurements, in a registry of its own. Names follow Prometheus' conventions under `tandem_`."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.timing import STAGES, Timing
from gateway.worker_metrics import WorkerCollector, WorkerView, cumulative

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_FINE_S = (
    0.0005,
    0.001,
    0.002,
    0.003,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
)
GAP_BOUNDS_S = (*_FINE_S, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0)


class GatewayMetrics:
    """Counted where it happens; rendered by `render()`."""

    def __init__(self, workers: Callable[[], Iterable[WorkerView]]) -> None:
        self._registry = CollectorRegistry()
        self.gaps = GapHistogram()
        self._registry.register(self.gaps)
        self._registry.register(WorkerCollector(workers))
        self._make_of_requests()
        self._make_of_handoffs()
        self._make_times()

    def _make_of_requests(self) -> None:
        count = self._counter
        self.requests = count("requests", "Requests by outcome.", "outcome")
        self.unauthenticated = count("unauthenticated", "Calls without an API key that is known.")
        self.admissions = count("admissions", "Decisions on requests that are valid.", "outcome", "tier")
        self.live = Gauge("tandem_live_requests", "Requests being served.", registry=self._registry)
        self.prompt_tokens = count("prompt_tokens", "Prompt tokens of ended requests.")
        self.output_tokens = count("output_tokens", "Tokens generated.")
        self.cached_tokens = count(
            "prefix_hit_tokens", "Prompt tokens found in a cache, by whose it was.", "source"
        )

    def _make_of_handoffs(self) -> None:
        count = self._counter
        self.retries = count("retries", "Attempts after the first, by cause.", "cause")
        self.resends = count("resends", "Attempts that send blocks again which are still leased.")
        self.refusals = count("decode_refusals", "Reserves that one decode worker had no room for.")
        self.preemptions = count("preemptions", "Places in decode batches lost to older requests.")
        self.local_prefills = count(
            "local_prefills", "Prompts computed on a decode worker, by cause.", "cause"
        )
        self.kv_bytes = count("kv_sent_bytes", "KV bytes that crossed.", "connector")

    def _make_times(self) -> None:
        times = self._histogram
        self.first_token = times("time_to_first_token_seconds", "Arrival to first token.")
        self.total = times("request_seconds", "Arrival to end.")
        self.stages = times("stage_seconds", "Stages of a request.", "stage")
        self.transfers = times("transfer_wait_seconds", "The stage `transfer`, by connector.", "connector")

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"tandem_{name}", about, labels, registry=self._registry)

    def _histogram(self, name: str, about: str, *labels: str) -> Histogram:
        return Histogram(f"tandem_{name}", about, labels, buckets=_SECONDS, registry=self._registry)

    def observe(self, timing: Timing) -> None:
        """One choice that ended with tokens: its stages add up to its total."""
        self.first_token.observe(timing.time_to_first_token_s)
        self.total.observe(timing.total_s)
        for stage in STAGES:
            self.stages.labels(stage=stage.removesuffix("_s")).observe(getattr(timing, stage))
        if timing.connector:
            self.transfers.labels(connector=timing.connector).observe(timing.transfer_s)

    def render(self) -> bytes:
        """Prometheus text format: the gateway's and the process's metrics."""
        return generate_latest(self._registry) + generate_latest(REGISTRY)


class GapHistogram(Collector):
    """Times between a choice's tokens. Every token passes here, so it is a bisection and two additions."""

    def __init__(self) -> None:
        self._counts = [0] * (len(GAP_BOUNDS_S) + 1)
        self._sum_s = 0.0

    def note(self, gap_s: float) -> None:
        self._counts[bisect_left(GAP_BOUNDS_S, gap_s)] += 1
        self._sum_s += gap_s

    def collect(self) -> Iterator[Metric]:
        gaps = HistogramMetricFamily("tandem_inter_token_seconds", "From one token of a choice to its next.")
        gaps.add_metric([], cumulative(GAP_BOUNDS_S, self._counts), self._sum_s)
        yield gaps
