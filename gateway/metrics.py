"""The gateway's own measurements, in a registry of its own. Names follow Prometheus' conventions under `tandem_`."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.routing.worker_table import WorkerRow
from gateway.timing import STAGES, Timing

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class GatewayMetrics:
    """Counted where it happens; rendered by `render()`."""

    def __init__(self, workers: Callable[[], Iterable[WorkerRow]]) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter("tandem_requests", "Requests by outcome.", ["outcome"], registry=registry)
        self.retries = Counter(
            "tandem_retries", "Attempts after the first, by cause.", ["cause"], registry=registry
        )
        self.resends = Counter(
            "tandem_resends", "Attempts that send blocks again which are still leased.", registry=registry
        )
        self.preemptions = Counter(
            "tandem_preemptions", "Places in decode batches lost to older requests.", registry=registry
        )
        self.local_prefills = Counter(
            "tandem_local_prefills",
            "Prompts computed on a decode worker, by cause.",
            ["cause"],
            registry=registry,
        )
        self.live = Gauge("tandem_live_requests", "Requests being served.", registry=registry)
        self.prompt_tokens = Counter(
            "tandem_prompt_tokens", "Prompt tokens of ended requests.", registry=registry
        )
        self.output_tokens = Counter("tandem_output_tokens", "Tokens generated.", registry=registry)
        self.cached_tokens = Counter(
            "tandem_prefix_hit_tokens", "Prompt tokens found in a prefill cache.", registry=registry
        )
        self.kv_bytes = Counter(
            "tandem_kv_sent_bytes", "KV bytes that crossed.", ["connector"], registry=registry
        )
        self.first_token = Histogram(
            "tandem_time_to_first_token_seconds",
            "Arrival to first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.total = Histogram(
            "tandem_request_seconds", "Arrival to end.", buckets=_SECONDS, registry=registry
        )
        self.stages = Histogram(
            "tandem_stage_seconds", "Stages of a request.", ["stage"], buckets=_SECONDS, registry=registry
        )
        registry.register(_WorkerCollector(workers))

    def observe(self, timing: Timing) -> None:
        """One request that ended with tokens: its stages add up to its total."""
        self.first_token.observe(timing.time_to_first_token_s)
        self.total.observe(timing.total_s)
        for stage in STAGES:
            self.stages.labels(stage=stage.removesuffix("_s")).observe(getattr(timing, stage))

    def render(self) -> bytes:
        """Prometheus text format: the gateway's and the process's metrics."""
        return generate_latest(self._registry) + generate_latest(REGISTRY)


class _WorkerCollector(Collector):
    """Gauges read off the sessions at scrape time."""

    def __init__(self, workers: Callable[[], Iterable[WorkerRow]]) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        labels = ["role", "worker"]
        blocks = GaugeMetricFamily("tandem_blocks", "Blocks by state.", labels=[*labels, "state"])
        running = GaugeMetricFamily("tandem_running_sequences", "Sequences in the batch.", labels=labels)
        waiting = GaugeMetricFamily("tandem_waiting_sequences", "Sequences waiting.", labels=labels)
        queued = GaugeMetricFamily("tandem_queued_tokens", "Prompt tokens not computed yet.", labels=labels)
        step = GaugeMetricFamily("tandem_step_seconds", "Duration of the latest step.", labels=labels)
        for worker in self._workers():
            names = [worker.record.role.value, worker.record.worker_id]
            for state, count in worker.load.blocks_by_state.items():
                blocks.add_metric([*names, state], count)
            running.add_metric(names, worker.load.num_running)
            waiting.add_metric(names, worker.load.num_waiting)
            queued.add_metric(names, worker.load.num_queued_tokens)
            step.add_metric(names, worker.load.step_s)
        yield from (blocks, running, waiting, queued, step)
