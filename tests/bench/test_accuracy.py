"""Predictions beside what they predict."""

import pytest

from bench.accuracy import Pair, plans_of, winners
from bench.simulation.costs import HostCosts, Profile, StepCosts
from bench.summary import Slo, summarize
from tests.bench.test_summary import outcome

COSTS = HostCosts.same(StepCosts(((1, 0.01),), ((1, 0.001),), 0.0, 0.0))


def pair(name: str, measured_s: float, simulated_s: float, rate: float = 2.0) -> Pair:
    slo = Slo(first_token_s=1.0)
    sides = [summarize([outcome(first_s, 0.1)] * 4, slo, rate) for first_s in (measured_s, simulated_s)]
    return Pair(name, rate, *sides)


def test_errors_are_relative_to_what_was_measured():
    errors = pair("a", 0.5, 0.6).errors()
    assert errors["first token p50"] == pytest.approx(0.2)
    assert errors["gaps p90"] == pytest.approx(0.0)
    assert errors["attainment"] == 0.0
    assert pair("a", 0.9, 1.1).errors()["attainment"] == -1.0


def test_the_winner_at_each_rate_is_who_attains_most():
    pairs = [pair("a", 0.5, 0.5), pair("b", 1.5, 1.5), pair("a", 1.5, 1.5, 3.0), pair("b", 0.5, 1.6, 3.0)]
    assert winners(pairs) == {2.0: ("a", "a"), 3.0: ("b", "a")}


def test_a_tandem_shares_the_cores_and_one_process_has_them_all():
    tandem, colocated = plans_of(Profile("m", 1, 100, {1: COSTS, 2: COSTS}), [128], 0.05, borrows=True)
    assert (tandem.num_threads, tandem.pace_s, tandem.borrows, tandem.num_colocated) == (1, 0.05, True, 0)
    assert (colocated.num_threads, colocated.num_colocated, colocated.token_budget) == (2, 1, 128)
