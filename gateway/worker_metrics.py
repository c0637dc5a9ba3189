"""What workers say of themselves, as metrics of the gateway: read off the sessions at scrape time. Workers count, and
send their counts with their load; so they have no port for it, and a scrape costs them nothing."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from core.load import BATCH_BOUNDS, STEP_BOUNDS_S, Load
from core.worker import Role, WorkerRecord

_LABELS = ("role", "worker")


class WorkerView(Protocol):
    """A worker as its session shows it."""

    @property
    def record(self) -> WorkerRecord: ...

    @property
    def load(self) -> Load: ...

    @property
    def is_up(self) -> bool: ...


class WorkerCollector(Collector):
    """Of the workers whose session is up; of the others only that there are some."""

    def __init__(self, workers: Callable[[], Iterable[WorkerView]]) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        workers = list(self._workers())
        yield _by_state(workers)
        up = [worker for worker in workers if worker.is_up]
        yield from _gauges(up)
        yield from _steps(up)
        yield from _counters(up)
        yield from _transfers(up)
        yield from _disks(up)


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """A histogram's buckets from what each holds alone, the last being beyond all bounds. Counts may be missing:
    then nothing was counted."""
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(names, accumulate(counts or [0] * len(names)), strict=True))


def _by_state(workers: Iterable[WorkerView]) -> Metric:
    found = GaugeMetricFamily("tandem_workers", "Workers known.", labels=("role", "state"))
    counts = {(role.value, state): 0 for role in Role for state in ("up", "draining", "down")}
    for worker in workers:
        state = "draining" if worker.load.is_draining else "up"
        counts[worker.record.role.value, state if worker.is_up else "down"] += 1
    for names, count in counts.items():
        found.add_metric(names, count)
    return found


def _names(worker: WorkerView) -> list[str]:
    return [worker.record.role.value, worker.record.worker_id]


def _gauges(workers: Sequence[WorkerView]) -> Iterator[Metric]:
    blocks = GaugeMetricFamily("tandem_blocks", "Blocks by state.", labels=[*_LABELS, "state"])
    for worker in workers:
        for state, count in worker.load.blocks_by_state.items():
            blocks.add_metric([*_names(worker), state], count)
    yield blocks
    for name, about, field in (
        ("running_sequences", "Sequences in the batch.", "num_running"),
        ("waiting_sequences", "Sequences waiting.", "num_waiting"),
        ("suspended_sequences", "Of those, with readers that take nothing.", "num_suspended"),
        ("queued_tokens", "Prompt tokens not computed yet.", "num_queued_tokens"),
    ):
        gauge = GaugeMetricFamily(f"tandem_{name}", about, labels=_LABELS)
        for worker in workers:
            gauge.add_metric(_names(worker), getattr(worker.load, field))
        yield gauge


def _steps(workers: Sequence[WorkerView]) -> Iterator[Metric]:
    times = HistogramMetricFamily("tandem_step_seconds", "Durations of an engine's steps.", labels=_LABELS)
    batches = HistogramMetricFamily("tandem_step_sequences", "Sequences of a step.", labels=_LABELS)
    for worker in workers:
        counts, names = worker.load.counts, _names(worker)
        times.add_metric(names, cumulative(STEP_BOUNDS_S, counts.steps_by_time), counts.steps_s)
        batches.add_metric(names, cumulative(BATCH_BOUNDS, counts.steps_by_batch), counts.num_batched)
    yield from (times, batches)


def _counters(workers: Sequence[WorkerView]) -> Iterator[Metric]:
    tokens = CounterMetricFamily(
        "tandem_computed_tokens", "Tokens whose KV an engine computed.", labels=[*_LABELS, "kind"]
    )
    lost = CounterMetricFamily(
        "tandem_worker_preemptions", "Sequences that lost their place to others.", labels=_LABELS
    )
    for worker in workers:
        counts, names = worker.load.counts, _names(worker)
        tokens.add_metric([*names, "prompt"], counts.num_prompt_tokens)
        tokens.add_metric([*names, "output"], counts.num_output_tokens)
        tokens.add_metric([*names, "recomputed"], counts.num_recomputed_tokens)
        lost.add_metric(names, counts.num_preemptions)
    yield from (tokens, lost)


def _transfers(workers: Sequence[WorkerView]) -> Iterator[Metric]:
    labels = ["worker", "connector"]
    number = CounterMetricFamily("tandem_transfers", "Transfers that a worker began.", labels=labels)
    size = CounterMetricFamily("tandem_transfer_bytes", "KV bytes that they carried.", labels=labels)
    time = CounterMetricFamily("tandem_transfer_seconds", "Their time with something to send.", labels=labels)
    for worker in workers:
        for sent in worker.load.counts.sent:
            names = [worker.record.worker_id, sent.connector]
            number.add_metric(names, sent.num_transfers)
            size.add_metric(names, sent.num_bytes)
            time.add_metric(names, sent.seconds)
    yield from (number, size, time)


def _disks(workers: Sequence[WorkerView]) -> Iterator[Metric]:
    kinds = (GaugeMetricFamily, CounterMetricFamily)
    for kind, name, about, field in (
        (0, "blocks", "Blocks on a worker's disk.", "num_blocks"),
        (0, "bytes", "Bytes of its files.", "num_bytes"),
        (1, "read_blocks", "Blocks read from disk for a prompt.", "num_read"),
        (1, "written_blocks", "Blocks saved.", "num_written"),
        (1, "evicted_blocks", "Saved blocks that had to go for others.", "num_evicted"),
        (1, "bad_blocks", "Saved blocks that were found damaged.", "num_bad"),
        (1, "errors", "Times that the disk refused.", "num_errors"),
    ):
        family = kinds[kind](f"tandem_disk_cache_{name}", about, labels=["worker"])
        for worker in workers:
            if worker.load.counts.disk is not None:
                family.add_metric([worker.record.worker_id], getattr(worker.load.counts.disk, field))
        yield family
