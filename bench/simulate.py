"""A cluster under traffic, in simulated time: `tandem bench simulate`.

Schedulers, router, admission and block pools are those of the services (`bench/simulation/`); what a step takes comes
from a profile. The same traffic gives the same result, to the last digit.
"""

import gc
import json
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from bench import plots, report
from bench.simulation.cluster import Cluster, Plan, any_chain, chain_of
from bench.simulation.costs import HostCosts, Profile
from bench.simulation.requests import Asked, outcome_of, summarize
from bench.summary import ATTAINMENT, GOODPUT, Slo, Summary, goodput_per_s
from bench.traffic import Traffic
from core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Simulated:
    """What came of it, and what it took to find out."""

    summary: Summary
    requests: list[Asked]
    num_steps: int
    num_events: int
    took_s: float
    peak_bytes: int


def simulate(
    plan: Plan, profile: Profile, traffic: Traffic, slo: Slo, costs: HostCosts | None = None
) -> Simulated:
    """Every request of the traffic to its end."""
    started_s = time.process_time()
    cluster = Cluster(plan, profile, costs)
    requests: list[Asked] = []
    was_collecting = gc.isenabled()
    gc.disable()  # millions of objects live on, none of them in a cycle
    try:
        cluster.run(_asked(plan, traffic, requests))
    finally:
        if was_collecting:
            gc.enable()
    return Simulated(
        summarize(requests, cluster.gaps, slo, traffic.rate_per_s),
        requests,
        cluster.num_steps,
        cluster.timeline.num_events,
        time.process_time() - started_s,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _asked(plan: Plan, traffic: Traffic, requests: list[Asked]) -> Iterator[tuple[Asked, Sequence[int]]]:
    """The requests and their prompts; they are kept in `requests`. Prompts of a length are one list: nobody looks at
    their tokens."""
    params: dict[int, SamplingParams] = {}
    prompts: dict[int, list[int]] = {}
    for index, planned in enumerate(traffic.requests):
        num_prompt, num_output = planned.num_prompt, planned.num_output
        if num_output not in params:
            params[num_output] = SamplingParams(max_tokens=num_output, temperature=0.0)
        if num_prompt not in prompts:
            prompts[num_prompt] = [1] * num_prompt
        chain = (
            chain_of(num_prompt, planned.shared, traffic.block_tokens, index)
            if plan.has_prefix_cache
            else any_chain(num_prompt)
        )
        asked = Asked(index, planned.at_s, num_prompt, params[num_output], chain)
        requests.append(asked)
        yield asked, prompts[num_prompt]


def run(
    plan: Plan,
    profile: Profile,
    traffics: Sequence[Traffic],
    slo: Slo,
    attainment: float = ATTAINMENT,
    json_path: Path | None = None,
    html_path: Path | None = None,
) -> list[Simulated]:
    """Each traffic, shown as a table; the files if asked for."""
    done = [simulate(plan, profile, traffic, slo) for traffic in traffics]
    summaries = {f"{found.summary.asked_per_s:.3g} a second": found.summary for found in done}
    console = Console(width=max(100, Console().width))
    report.show(f"simulated: {traffics[0].name}", summaries, console)
    lines = _lines(done, slo, attainment)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    if json_path is not None:
        told = {"plan": asdict(plan), "profile": asdict(profile), "slo": asdict(slo), "conclusions": lines}
        runs = [
            {"traffic": t.name, "summary": asdict(d.summary)} for t, d in zip(traffics, done, strict=True)
        ]
        report.write(json_path, json.dumps({**told, "runs": runs}, indent=1))
    if html_path is not None:
        report.write(html_path, _html(done, slo, attainment, lines))
    return done


def _lines(done: Sequence[Simulated], slo: Slo, attainment: float) -> list[str]:
    lines = []
    if slo != Slo():
        points = [(found.summary.asked_per_s, found.summary.attainment) for found in done]
        lines.append(GOODPUT.format(attainment=attainment, slo=slo))
        lines.append(f"Goodput: {goodput_per_s(points, attainment):.2f} requests a second.")
    num_requests, took_s = sum(len(found.requests) for found in done), sum(found.took_s for found in done)
    lines.append(
        f"{num_requests} requests in {sum(found.num_steps for found in done)} steps took {took_s:.1f} s of one core, "
        f"{took_s / num_requests * 1e6:.0f} microseconds each, and {done[-1].peak_bytes / 1e9:.2f} GB."
    )
    return lines


def _html(done: Sequence[Simulated], slo: Slo, attainment: float, lines: Sequence[str]) -> str:
    names = [f"{found.summary.asked_per_s:.3g} a second" for found in done]
    drawn = []
    if len(done) > 1:
        points = {"simulated": [(found.summary.asked_per_s, found.summary.attainment) for found in done]}
        drawn.append(plots.attainment(points, attainment))
    runs = {
        name: [outcome_of(asked) for asked in found.requests] for name, found in zip(names, done, strict=True)
    }
    limits = plots.slo_limits(slo)
    drawn += [
        plots.distribution(runs, name, limits.get(name)) for name in ("first_token", "per_token", "total")
    ]
    rows = report.rows_of({name: found.summary for name, found in zip(names, done, strict=True)})
    return report.page("A simulated cluster", lines, {"Runs": (names, rows)}, drawn)
