"""The search for good options, over a made-up machine; and the file that comes of it, as `serve` reads it."""

import random
import tomllib
from dataclasses import replace

import click
import pytest

from bench import tune
from bench.simulation.cluster import Plan
from bench.simulation.costs import HostCosts, LinkCosts, Profile, StepCosts
from bench.summary import Slo
from bench.traffic import Lengths, Traffic, synthetic
from tandem.cli import main

COSTS = StepCosts(((1, 0.01), (64, 0.05), (512, 0.4)), ((1, 0.001), (64, 0.004)), 1e-8, 1e-8)
SLOWER = COSTS.scaled(1.2, 1.2)
HOST = HostCosts(COSTS, COSTS.scaled(0.6, 0.6), SLOWER)
PROFILE = Profile("m", 1000, 4096, {1: HOST, 2: HostCosts.same(COSTS.scaled(0.6, 0.6))}, LinkCosts())


def traffic(rate: float) -> Traffic:
    return synthetic(20, rate, 1.0, Lengths(400, 30, 0.5), random.Random(1))


WISH = tune.Wish(traffic, Slo(first_token_s=2.0, per_token_s=0.1))


def test_the_predicted_goodput_is_where_attainment_falls():
    plan = Plan(is_one_host=True)
    rate = tune.predicted_per_s(plan, PROFILE, WISH)
    assert rate > 0
    assert tune.simulate(plan, PROFILE, traffic(rate), WISH.slo).summary.attainment >= 0.9
    assert tune.simulate(plan, PROFILE, traffic(1.3 * rate), WISH.slo).summary.attainment < 0.9


def test_the_search_tries_every_topology_and_never_ends_worse_than_it_began():
    found = tune.search(PROFILE, WISH, num_cores=2)
    topologies = {(c.plan.num_colocated, c.plan.num_prefill, c.plan.num_decode) for c in found}
    assert topologies == {(1, 1, 1), (2, 1, 1), (0, 1, 1)}
    assert found[0].predicted_per_s == max(candidate.predicted_per_s for candidate in found)
    defaults = [c for c in found if c.plan in set(tune.topologies(2, PROFILE))]
    assert len(defaults) == 3
    assert found[0].predicted_per_s >= max(candidate.predicted_per_s for candidate in defaults)
    assert len({candidate.plan for candidate in found}) == len(found)


def test_the_few_that_are_measured_are_of_every_topology():
    plans = [Plan(token_budget=64), Plan(token_budget=128), Plan(num_colocated=1), Plan(token_budget=256)]
    candidates = [tune.Candidate(plan, 4.0 - index) for index, plan in enumerate(plans)]
    assert [c.plan for c in tune.best_few(candidates, 3)] == [plans[0], plans[2], plans[1]]
    assert [c.plan for c in tune.best_few(candidates, 1)] == plans[:1]


@pytest.mark.parametrize("goodput", [0.4, 0.95, 1.0, 1.4, 3.0])
def test_a_goodput_is_measured_between_two_rates_that_are_near_each_other(goodput):
    points, rate = [], 1.0
    while rate is not None and len(points) < tune.MAX_RUNS:
        points.append((rate, 1.0 if rate <= goodput else 0.5))
        rate = tune.next_rate(points, 0.9)
    assert rate is None
    low = max(rate for rate, reached in points if reached >= 0.9)
    assert low <= goodput < tune.NEAR * low * 1.001
    assert len(points) <= (3 if 0.8 <= goodput <= 1.25 else tune.MAX_RUNS)


def test_a_rate_that_did_well_by_chance_beyond_one_that_did_not_ends_the_measuring():
    assert tune.next_rate([(1.0, 0.95), (1.25, 0.8), (1.12, 0.95), (1.4, 0.95)], 0.9) is None


def test_the_grid_has_the_default_and_something_of_every_topology():
    made = tune.grid(2, PROFILE, WISH.slo)
    assert len(set(made)) == len(made) == 8
    assert replace(tune.DEFAULT, num_threads=1) in made
    assert {plan.pace_s for plan in made if plan.num_colocated} == {0.0}
    assert len(tune.grid(2, PROFILE, Slo(first_token_s=1.0))) == 6


def test_what_was_found_is_told_against_the_best_and_the_default():
    found = tune.Candidate(Plan(token_budget=64, num_colocated=1), 2.0, 1.9)
    default = tune.Candidate(tune.DEFAULT, 1.0, 1.0)
    told = tune.against(found, [tune.Candidate(Plan(num_colocated=1), 2.0, 2.0), default])
    assert "1.90, 0.95 of the grid's best and 1.90 of the default (1P1D" in told


@pytest.mark.parametrize(
    "plan", [Plan(pace_s=0.05, token_budget=128, max_local_tokens=64), Plan(num_colocated=2, block_size=32)]
)
def test_the_file_is_what_serve_takes(plan, tmp_path):
    path = tmp_path / "tandem.toml"
    candidate = replace(tune.Candidate(plan, 3.0), measured_per_s=2.5)
    path.write_text(tune.as_toml("smollm2", candidate, WISH, traffic(1.0)))
    assert tomllib.loads(path.read_text())["token-budget"] == plan.token_budget
    assert "simulated 3.00, measured 2.50" in path.read_text()
    serve = main.commands["serve"]
    told = serve.make_context("serve", ["--config", str(path), "--max-batch", "7"]).params
    assert (told["token_budget"], told["block_size"], told["max_batch"]) == (
        plan.token_budget,
        plan.block_size,
        7,
    )
    assert told["model"] == "smollm2"
    assert told["num_colocated"] == plan.num_colocated
    given = serve.make_context("serve", tune.as_arguments(plan)).params
    assert given["max_local_tokens"] == told["max_local_tokens"] == plan.max_local_tokens
    assert given["pace"] == told["pace"] == plan.pace_s


@pytest.mark.parametrize(
    ("text", "told"),
    [("tokn-budget = 3", "tokn-budget"), ("nonsense", "Expected"), ('config = "x"', "config")],
)
def test_a_file_that_is_wrong_is_refused_by_what_is_wrong(tmp_path, text, told):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(click.BadParameter, match=told):
        main.commands["serve"].make_context("serve", ["--config", str(path)])
    with pytest.raises(click.BadParameter, match="nowhere"):
        main.commands["serve"].make_context("serve", ["--config", str(tmp_path / "nowhere")])
