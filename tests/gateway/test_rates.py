"""Rates and quantiles of the last whole seconds, at a cost that does not depend on how much happened."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.clock import VirtualClock
from gateway.rates import LATENCY_S, MAX_FLOWS, RATE_S, WINDOW_S, Rates, Spread


def test_a_rate_is_the_mean_of_the_last_whole_seconds_and_not_of_the_one_that_runs():
    clock = VirtualClock(1000.5)
    rates = Rates(clock)
    for second in range(RATE_S):
        rates.now().num_output_tokens += 10 * second
        rates.now().num_arrived += 1
        clock.advance(1.0)
    rates.now().num_output_tokens += 10**6
    found = rates.per_second()
    assert (found.output_tokens, found.arrivals, found.over_s) == (20.0, 1.0, RATE_S)
    clock.advance(RATE_S + 1.0)
    assert rates.per_second().output_tokens == 0


def test_history_is_second_by_second_and_what_is_older_is_forgotten():
    clock = VirtualClock(50.0)
    rates = Rates(clock)
    for second in range(3 * WINDOW_S):
        if second % 3 == 0:
            rates.now().num_ended += second + 1
        clock.advance(1.0)
    history = rates.history()
    wanted = [second + 1 if second % 3 == 0 else 0 for second in range(2 * WINDOW_S, 3 * WINDOW_S)]
    assert history.requests == wanted
    assert all(len(series) == WINDOW_S for series in (history.refused, history.kv_bytes, history.gap_p99_s))
    assert set(history.first_token_p50_s) == {None}


@given(st.lists(st.floats(0.0002, 900.0), min_size=1, max_size=200))
def test_a_quantile_is_right_to_a_twentieth(durations):
    spread = Spread()
    for duration_s in durations:
        spread.add(duration_s)
    found, ordered = spread.quantiles(), sorted(durations)
    assert found.num == len(durations)
    for told, share in ((found.p50, 0.5), (found.p99, 0.99)):
        rank = max(-(-len(ordered) * share // 1), 1)
        assert told == pytest.approx(ordered[int(rank) - 1], rel=0.051)


def test_latencies_are_those_of_their_window_put_together():
    clock = VirtualClock(7.0)
    rates = Rates(clock)
    rates.now().gaps.add(100.0)
    clock.advance(LATENCY_S + 1.0)
    for gap_s in (0.010, 0.010, 0.020):
        rates.now().gaps.add(gap_s)
        clock.advance(1.0)
    found = rates.latencies()
    assert found.gap_s.num == 3
    assert found.gap_s.p50 == pytest.approx(0.010, rel=0.05)
    assert found.gap_s.p99 == pytest.approx(0.020, rel=0.05)
    assert found.first_token_s == Spread().quantiles()


def test_nothing_that_takes_no_time_or_a_whole_day_breaks_the_scale():
    spread = Spread()
    for duration_s in (0.0, -1.0, 1e-9, 86400.0):
        spread.add(duration_s)
    assert spread.quantiles().num == 4


def test_flows_are_bounded_and_the_bytes_of_all_are_counted():
    clock = VirtualClock(10.0)
    rates = Rates(clock)
    for at in range(2 * MAX_FLOWS):
        rates.flow((f"p{at}", "d"), RATE_S * (2 if at == 5 else 1))
    clock.advance(1.0)
    flows = rates.flows()
    assert len(flows) == MAX_FLOWS
    assert (flows[0].prefill_worker_id, flows[0].bytes_per_s) == ("p5", 2.0)
    assert rates.per_second().kv_bytes == 2 * MAX_FLOWS + 1
