"""Simulated clusters: everything that was asked ends, nothing is kept, and what it takes follows from the costs."""

import math
import random
from dataclasses import replace

import pytest

from bench.simulate import simulate
from bench.simulation.cluster import Cluster, Plan, chain_of
from bench.simulation.costs import HostCosts, LinkCosts, Profile, StepCosts, interpolate
from bench.simulation.requests import Asked
from bench.summary import Slo
from bench.traffic import Lengths, Planned, Traffic, synthetic
from core.sampling import SamplingParams

COSTS = StepCosts(((1, 0.01), (64, 0.02), (512, 0.1)), ((1, 0.001), (64, 0.004)), 1e-8, 1e-8)
LINK = LinkCosts(0.002, 0.0005, 0.001, 0.0005, 0.0, 0.001, 1e9)
PROFILE = Profile("m", 1000, 4096, {1: HostCosts.same(COSTS)}, LINK)
PLAN = Plan(num_blocks=400, has_prefix_cache=False)


def traffic(num_requests: int = 60, rate: float = 8.0, spread: float = 0.9) -> Traffic:
    return synthetic(num_requests, rate, 1.0, Lengths(300, 40, spread), random.Random(1))


def test_costs_are_linear_between_the_measured_ones():
    points = ((2, 4.0), (4, 6.0), (8, 14.0))
    assert [interpolate(points, x) for x in (1, 2, 3, 6, 10)] == [2.0, 4.0, 5.0, 10.0, 18.0]
    assert COSTS.step_s(64, 1, 1000, 0) == pytest.approx(0.02 + 0.001 + 1e-5)


def test_one_request_takes_what_its_steps_and_ways_take():
    asked = Traffic("one", (Planned(0.0, 300, 5),))
    (request,) = simulate(PLAN, PROFILE, asked, Slo()).requests
    prefill_s = COSTS.step_s(300, 1, 300 * 301 / 2, 0) + LINK.step_overhead_s
    assert request.first_s == pytest.approx(LINK.front_s + 2 * LINK.hop_s + prefill_s + LINK.token_s)
    steps_s = sum(COSTS.step_s(1, 1, 0, 301 + index) + LINK.step_overhead_s for index in range(4))
    transfer_s = LINK.transfer_s + 300 * 1000 / LINK.bytes_per_s
    assert request.last_s - request.first_s == pytest.approx(transfer_s + steps_s)
    assert request.worst_gap_s == pytest.approx(
        transfer_s + COSTS.step_s(1, 1, 0, 301) + LINK.step_overhead_s
    )


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        replace(PLAN, num_prefill=3, num_decode=2),
        replace(PLAN, num_colocated=2),
        replace(PLAN, max_local_tokens=250),
        replace(PLAN, num_blocks=80, max_batch=4),
        replace(PLAN, has_prefix_cache=True),
        replace(PLAN, is_one_host=True),
        replace(PLAN, is_one_host=True, pace_s=0.05),
        replace(PLAN, is_one_host=True, borrows=False, num_colocated=1),
    ],
)
def test_every_request_ends_whole_and_every_block_is_free(plan):
    plan = replace(plan, max_queue_s=math.inf)
    asked = traffic()
    cluster = Cluster(plan, PROFILE)
    requests = []
    for index, planned in enumerate(asked.requests):
        params = SamplingParams(max_tokens=planned.num_output, temperature=0.0)
        chain = chain_of(planned.num_prompt, (), 512, index)
        requests.append(Asked(index, planned.at_s, planned.num_prompt, params, chain))
    cluster.run((request, [1] * request.num_prompt) for request in requests)
    assert all(request.is_whole for request in requests)
    for worker in cluster.workers:
        pool = worker.tier.engine.scheduler.pool
        pool.check()
        assert pool.num_available == pool.num_blocks, worker.record.worker_id
    for table in cluster.tables.values():
        for row in table.rows:
            assert (row.num_pending, row.num_pending_tokens) == (0, 0), row.record.worker_id
    assert cluster._num_waiting_blocks == 0
    assert not cluster._flows
    assert sum(1 for request in requests for _ in range(request.num_tokens - 1)) == sum(
        cluster.gaps._counts.values()
    ) + sum(cluster.gaps._new_counts)


def test_the_same_traffic_gives_the_same_result_and_leaps_change_nothing(monkeypatch):
    leaping = simulate(PLAN, PROFILE, traffic(), Slo())
    assert simulate(PLAN, PROFILE, traffic(), Slo()).summary == leaping.summary
    monkeypatch.setattr("bench.simulation.worker.SimWorker._begin_leap", lambda worker: False)
    stepping = simulate(PLAN, PROFILE, traffic(), Slo())
    assert stepping.num_steps == leaping.num_steps
    assert stepping.num_events > 2 * leaping.num_events
    for one, other in zip(leaping.requests, stepping.requests, strict=True):
        assert (one.first_s, one.last_s) == pytest.approx((other.first_s, other.last_s))
        assert one.worst_gap_s == pytest.approx(other.worst_gap_s, rel=0.02)
    assert leaping.summary.gap.p50 == pytest.approx(stepping.summary.gap.p50, rel=0.02)


def test_who_would_wait_too_long_is_refused():
    plan = replace(PLAN, max_queue_s=0.2)
    summary = simulate(plan, PROFILE, traffic(200, rate=50.0), Slo()).summary
    assert summary.num_refused > 20
    assert summary.num_whole == 200 - summary.num_refused


def test_a_shared_prefix_is_computed_once():
    requests = tuple(Planned(2.0 * index, 1024, 4, shared=(7,)) for index in range(6))
    shared = simulate(replace(PLAN, has_prefix_cache=True), PROFILE, Traffic("shared", requests), Slo())
    own = simulate(PLAN, PROFILE, Traffic("own", requests), Slo())
    first, *others = (request.first_s - request.at_s for request in shared.requests)
    assert first == pytest.approx(own.requests[0].first_s)
    assert max(others) < 0.7 * first


def test_neighbours_slow_each_other_down_and_idle_ones_help():
    faster, slower = COSTS.scaled(0.5, 0.5), COSTS.scaled(2.0, 2.0)
    profile = replace(PROFILE, engines={1: HostCosts(COSTS, faster, slower)})
    single = Traffic("one", (Planned(0.0, 500, 2),))

    def first_s(**options: object) -> float:
        (request,) = simulate(replace(PLAN, **options), profile, single, Slo()).requests
        return request.first_s

    assert first_s(is_one_host=True) == pytest.approx(0.5 * first_s(), rel=0.2)
    assert first_s(is_one_host=True, borrows=False) == pytest.approx(first_s(), rel=0.01)
    streams = [Planned(0.0, 16, 200) for _ in range(2)]
    busy = Traffic("busy", (*streams, Planned(1.0, 500, 2)))
    beside = simulate(replace(PLAN, is_one_host=True), profile, busy, Slo()).requests[-1]
    assert beside.first_s - beside.at_s == pytest.approx(2 * first_s(), rel=0.25)
    paced = simulate(replace(PLAN, is_one_host=True, pace_s=0.1), profile, busy, Slo()).requests[-1]
    assert paced.first_s - paced.at_s < 0.7 * (beside.first_s - beside.at_s)
