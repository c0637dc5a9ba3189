"""Metrics that are not prometheus-client's own objects render as its would; workers are told from what they say."""

import re
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from core.load import BATCH_BOUNDS, STEP_BOUNDS_S, Counts, Load, Sent
from core.worker import Role, WorkerRecord
from gateway.metrics import GAP_BOUNDS_S, GapHistogram, GatewayMetrics
from gateway.timing import Timing
from tests.gateway.peers import Worker


@dataclass(frozen=True)
class View:
    record: WorkerRecord
    load: Load
    is_up: bool = True


def rendered(*workers: View) -> dict[str, float]:
    text = GatewayMetrics(lambda: workers).render().decode()
    return {name: float(value) for name, value in re.findall(r"^(tandem_\S+) (\S+)$", text, re.MULTILINE)}


def view(name: str, role: Role, load: Load, is_up: bool = True) -> View:
    return View(Worker(name, role).record, load, is_up)


@given(st.lists(st.one_of(st.floats(0, 20), st.sampled_from(GAP_BOUNDS_S))))
def test_gaps_fall_into_the_buckets_of_a_usual_histogram(gaps):
    ours, usual = GapHistogram(), CollectorRegistry()
    theirs = Histogram("tandem_inter_token_seconds", "x", buckets=GAP_BOUNDS_S, registry=usual)
    registry = CollectorRegistry()
    registry.register(ours)
    for gap_s in gaps:
        ours.note(gap_s)
        theirs.observe(gap_s)

    def samples(registry: CollectorRegistry) -> set[str]:
        lines = generate_latest(registry).decode().splitlines()
        return {line for line in lines if not line.startswith("#") and "_created" not in line}

    assert samples(registry) == samples(usual)


def test_workers_are_counted_by_state_and_those_that_are_down_say_nothing():
    load = Load(num_blocks=4, blocks_by_state={"free": 3, "owned": 1}, num_running=2, num_suspended=1)
    found = rendered(
        view("p0", Role.PREFILL, load),
        view("d0", Role.DECODE, load),
        view("d1", Role.DECODE, Load(is_draining=True)),
        view("d2", Role.DECODE, load, is_up=False),
    )
    names = [(role, state) for role in ("prefill", "decode") for state in ("up", "draining", "down")]
    assert {(r, s): found[f'tandem_workers{{role="{r}",state="{s}"}}'] for r, s in names} == {
        ("prefill", "up"): 1,
        ("prefill", "draining"): 0,
        ("prefill", "down"): 0,
        ("decode", "up"): 1,
        ("decode", "draining"): 1,
        ("decode", "down"): 1,
    }
    assert found['tandem_blocks{role="decode",state="free",worker="d0"}'] == 3
    assert found['tandem_suspended_sequences{role="decode",worker="d0"}'] == 1
    assert not [name for name in found if 'worker="d2"' in name]


def test_counts_of_a_worker_are_its_histograms_and_counters():
    steps = [0] * (len(STEP_BOUNDS_S) + 1)
    steps[0], steps[3], steps[-1] = 5, 2, 1
    batches = [0] * (len(BATCH_BOUNDS) + 1)
    batches[0] = 8
    counts = Counts(tuple(steps), 7.5, tuple(batches), 8, 100, 20, 3, 2, (Sent("tcp", 4, 1000, 0.5),))
    found = rendered(view("p0", Role.PREFILL, Load(counts=counts)), view("d0", Role.DECODE, Load()))
    labels = 'role="prefill",worker="p0"'
    assert found[f'tandem_step_seconds_bucket{{le="0.001",{labels}}}'] == 5
    assert found[f'tandem_step_seconds_bucket{{le="0.01",{labels}}}'] == 7
    assert found[f'tandem_step_seconds_bucket{{le="+Inf",{labels}}}'] == 8
    assert found[f"tandem_step_seconds_count{{{labels}}}"] == 8
    assert found[f"tandem_step_seconds_sum{{{labels}}}"] == 7.5
    assert found[f"tandem_step_sequences_sum{{{labels}}}"] == 8
    assert found['tandem_step_seconds_count{role="decode",worker="d0"}'] == 0, "it has told nothing yet"
    assert found['tandem_computed_tokens_total{kind="recomputed",role="prefill",worker="p0"}'] == 3
    assert found[f"tandem_worker_preemptions_total{{{labels}}}"] == 2
    assert found['tandem_transfer_bytes_total{connector="tcp",worker="p0"}'] == 1000


def test_only_what_crossed_has_waited_for_a_transfer():
    metrics = GatewayMetrics(list)
    metrics.observe(Timing(transfer_s=0.2, total_s=1.0, connector="ucx"))
    metrics.observe(Timing(total_s=1.0))
    text = metrics.render().decode()
    assert 'tandem_transfer_wait_seconds_count{connector="ucx"} 1.0' in text
    assert 'connector=""' not in text
    assert 'tandem_stage_seconds_count{stage="transfer"} 2.0' in text
