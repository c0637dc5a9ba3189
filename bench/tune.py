"""Which options of `tandem serve` suit a machine, a model and a traffic: `tandem tune`.

    candidates ──simulated: goodput of each──► the best few ──served and measured──► the best one's configuration file

The search starts with every topology (tiers in each ratio that the cores allow, one-process engines) at the default
options and moves the best of them one option at a time, until nothing gets better.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import report
from bench.serve import Asked, Run, Target, measure, progress_bar
from bench.simulate import simulate
from bench.simulation.cluster import Plan
from bench.simulation.costs import Profile
from bench.summary import ATTAINMENT, GOODPUT, Slo, goodput_per_s
from bench.traffic import Traffic
from tandem.served import served

CHUNKS = (64, 128, 256, 512, 1024)
BATCHES = (8, 16, 32, 64)
BLOCK_SIZES = (16, 32, 64)
LOCAL_TOKENS = (0, 32, 64, 128, 256)
PACES = (0.0, 0.3, 0.5, 0.7, 0.9)
"""Parts of the time that the SLO allows between tokens."""

BETTER = 1.02
"""A step of the search is worth it from that ratio on."""
RATE_STEPS = 7
SLOWEST_PER_S = 0.01
NUM_TOPOLOGIES = 2
FAR, NEAR, MAX_RUNS = 1.25, 1.13, 7
"""A candidate is measured at its predicted goodput, then at FAR times more or less until one rate attains what is
wished and the next does not, then between these until they are within NEAR."""
GRID_CHUNKS = (64, 512)
GRID_PACE = 0.5
"""What the grid has of chunk sizes, and of paces beside none: parts of the time that the SLO allows."""

DEFAULT = Plan(is_one_host=True, max_queue_s=600.0)
"""What `tandem serve` runs unless told otherwise, but for its queue."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked of a system: at least `attainment` of a traffic's requests within `slo`. `traffic(rate)` is it at
    any rate."""

    traffic: Callable[[float], Traffic]
    slo: Slo
    attainment: float = ATTAINMENT


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration and its goodput, requests a second: as simulated, and as measured if it was."""

    plan: Plan
    predicted_per_s: float
    measured_per_s: float | None = None
    runs: tuple[Run, ...] = ()


def predicted_per_s(plan: Plan, profile: Profile, wish: Wish) -> float:
    """The highest rate at which the simulation attains what is wished, by halving the rates between."""

    def attains(rate: float) -> bool:
        return simulate(plan, profile, wish.traffic(rate), wish.slo).summary.attainment >= wish.attainment

    low, high = 0.0, 1.0
    while attains(high) and high < 1 << 20:
        low, high = high, 2 * high
    for _ in range(RATE_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if attains(middle) else (low, middle)
    return low


def topologies(num_cores: int, profile: Profile) -> Iterator[Plan]:
    """Every division of the host's cores among workers whose engines were profiled."""
    for num_workers in range(1, num_cores + 1):
        num_threads = num_cores // num_workers
        if num_threads not in profile.engines:
            continue
        own = replace(DEFAULT, num_threads=num_threads)
        yield replace(own, num_colocated=num_workers, borrows=False)
        for num_prefill in range(1, num_workers):
            yield replace(own, num_prefill=num_prefill, num_decode=num_workers - num_prefill)


def neighbours(plan: Plan, slo: Slo) -> Iterator[Plan]:
    """The plan with one option changed."""
    options: dict[str, Sequence[Any]] = {
        "token_budget": CHUNKS,
        "max_batch": BATCHES,
        "block_size": BLOCK_SIZES,
    }
    if not plan.num_colocated:
        options["max_local_tokens"] = LOCAL_TOKENS
        if slo.per_token_s is not None:
            options["pace_s"] = [round(part * slo.per_token_s, 4) for part in PACES]
    for name, values in options.items():
        for value in values:
            if value != getattr(plan, name):
                changed = replace(plan, **{name: value})
                if name == "block_size":
                    changed = replace(
                        changed, num_blocks=plan.num_blocks * plan.block_size // changed.block_size
                    )
                yield changed


def search(
    profile: Profile, wish: Wish, num_cores: int, note: Callable[[Candidate], None] = lambda candidate: None
) -> list[Candidate]:
    """Every candidate that was simulated, the best first."""
    seen: dict[Plan, Candidate] = {}

    def judge(plan: Plan) -> Candidate:
        if plan not in seen:
            seen[plan] = Candidate(plan, predicted_per_s(plan, profile, wish))
            note(seen[plan])
        return seen[plan]

    starts = sorted(map(judge, topologies(num_cores, profile)), key=lambda made: -made.predicted_per_s)
    for start in starts[:NUM_TOPOLOGIES]:
        best = start
        while True:
            better = max(map(judge, neighbours(best.plan, wish.slo)), key=lambda made: made.predicted_per_s)
            if better.predicted_per_s < BETTER * best.predicted_per_s:
                break
            best = better
    return sorted(seen.values(), key=lambda made: -made.predicted_per_s)


def grid(num_cores: int, profile: Profile, slo: Slo) -> list[Plan]:
    """A few of everything, to hold the search against: each topology with small and large chunks, tiers also paced.
    The default is among them."""
    paces = (0.0,) if slo.per_token_s is None else (0.0, round(GRID_PACE * slo.per_token_s, 4))
    return [
        replace(topology, token_budget=chunk, pace_s=pace_s)
        for topology in topologies(num_cores, profile)
        for chunk in GRID_CHUNKS
        for pace_s in (paces[:1] if topology.num_colocated else paces)
    ]


def best_few(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """The best of each topology, then the best of what is left: the simulator is surest of the order within one."""
    kinds: dict[tuple[int, int, int], Candidate] = {}
    for candidate in candidates:
        plan = candidate.plan
        kinds.setdefault((plan.num_prefill, plan.num_decode, plan.num_colocated), candidate)
    firsts = list(kinds.values())[:count]
    others = [candidate for candidate in candidates if candidate not in firsts]
    return [*firsts, *others][:count]


def serve_options(plan: Plan) -> dict[str, int | float]:
    """What `tandem serve` is told, by the names of its options; those that stand at their defaults as well, so that a
    file says everything that was decided."""
    options: dict[str, int | float] = {
        "token-budget": plan.token_budget,
        "max-batch": plan.max_batch,
        "block-size": plan.block_size,
    }
    if plan.num_colocated:
        return {"colocated": plan.num_colocated, **options}
    tiers = {"prefill": plan.num_prefill, "decode": plan.num_decode, "pace": plan.pace_s}
    return {**tiers, "max-local-tokens": plan.max_local_tokens, **options}


def as_arguments(plan: Plan) -> list[str]:
    return [word for name, value in serve_options(plan).items() for word in (f"--{name}", str(value))]


def as_toml(model: str, candidate: Candidate, wish: Wish, traffic: Traffic) -> str:
    """A file for `tandem serve --config`."""
    told = f"simulated {candidate.predicted_per_s:.2f}"
    if candidate.measured_per_s is not None:
        told += f", measured {candidate.measured_per_s:.2f}"
    lines = [
        f"# Made by `tandem tune` for {traffic.name}.",
        f"# {GOODPUT.format(attainment=wish.attainment, slo=wish.slo)}",
        f"# Goodput here, requests a second: {told}.",
        f"model = {json.dumps(model)}",
        *(f"{name} = {value}" for name, value in serve_options(candidate.plan).items()),
    ]
    return "\n".join(lines) + "\n"


async def confirm(
    candidate: Candidate, model: str, options: Sequence[str], wish: Wish, asked: Asked
) -> Candidate:
    """Serve it and measure its goodput."""
    name = describe(candidate.plan)
    command = [model, "--max-queue", "600", *options, *as_arguments(candidate.plan)]
    runs: list[Run] = []
    async with served(command) as addresses:
        with progress_bar(sys.stderr.isatty()) as bar:
            rate: float | None = max(candidate.predicted_per_s, SLOWEST_PER_S)
            while rate is not None and len(runs) < MAX_RUNS:
                traffic = replace(wish.traffic(rate), run=len(runs))
                runs.append(await measure(Target(addresses["http"]), traffic, wish.slo, asked, name, bar))
                rate = next_rate(points_of(runs), wish.attainment)
    goodput = goodput_per_s(points_of(runs), wish.attainment)
    return replace(candidate, measured_per_s=goodput, runs=tuple(runs))


def points_of(runs: Sequence[Run]) -> list[tuple[float, float]]:
    """Rate and attainment of each."""
    return [(run.summary.asked_per_s, run.summary.attainment) for run in runs]


def next_rate(points: Sequence[tuple[float, float]], attainment: float) -> float | None:
    """Where to measure after those (rate, attainment); None when they say where the goodput is."""
    low = [rate for rate, reached in points if reached >= attainment]
    high = [rate for rate, reached in points if reached < attainment]
    if not high:
        return FAR * max(low)
    if not low:
        return min(high) / FAR
    above = min((rate for rate in high if rate > max(low)), default=None)
    if above is None or above <= NEAR * max(low):
        return None
    return math.sqrt(max(low) * above)


def describe(plan: Plan) -> str:
    tiers = (
        f"{plan.num_colocated} colocated" if plan.num_colocated else f"{plan.num_prefill}P{plan.num_decode}D"
    )
    words = [tiers, f"chunk {plan.token_budget}", f"batch {plan.max_batch}", f"block {plan.block_size}"]
    if plan.pace_s:
        words.append(f"pace {plan.pace_s * 1e3:g} ms")
    if plan.max_local_tokens:
        words.append(f"local to {plan.max_local_tokens}")
    return ", ".join(words)


async def run(
    model: str,
    profile: Profile,
    wish: Wish,
    asked: Asked,
    num_cores: int,
    num_confirmed: int,
    options: Sequence[str],
    path: Path,
    json_path: Path | None = None,
    has_grid: bool = False,
) -> Candidate:
    """Search, confirm, and write the best one's file. `has_grid`: measure a grid as well, and tell how the best of it
    compares."""
    console = Console(width=max(110, Console().width))
    with progress_bar(sys.stderr.isatty()) as bar:
        task = bar.add_task("simulating", total=None)
        found = search(profile, wish, num_cores, lambda _: bar.advance(task))
    chosen = best_few(found, max(1, num_confirmed))
    if num_confirmed:
        chosen = [await confirm(candidate, model, options, wish, asked) for candidate in chosen]
        chosen.sort(key=lambda candidate: -(candidate.measured_per_s or 0.0))
    best = chosen[0]
    _show(f"goodput, requests a second: the best of {len(found)} simulated", chosen, console)
    others: list[Candidate] = []
    if has_grid:
        others = await _confirm_grid(
            grid(num_cores, profile, wish.slo), chosen, profile, wish, model, options, asked
        )
        _show("goodput, requests a second: a grid", others, console)
        console.print(against(best, others), markup=False, soft_wrap=True)
    traffic = wish.traffic(max(best.predicted_per_s, 1e-3))
    report.write(path, as_toml(model, best, wish, traffic))
    console.print(
        f"{describe(best.plan)}: written to {path}; start it with: tandem serve --config {path}", markup=False
    )
    if json_path is not None:
        report.write(json_path, json.dumps(_json(found, chosen, others, wish), indent=1))
    return best


async def _confirm_grid(
    plans: Sequence[Plan],
    chosen: Sequence[Candidate],
    profile: Profile,
    wish: Wish,
    model: str,
    options: Sequence[str],
    asked: Asked,
) -> list[Candidate]:
    """Measured, the best first; one that was chosen is not measured again."""
    known = {candidate.plan: candidate for candidate in chosen}
    measured = []
    for plan in plans:
        made = known.get(plan) or Candidate(plan, predicted_per_s(plan, profile, wish))
        measured.append(
            made if made.measured_per_s is not None else await confirm(made, model, options, wish, asked)
        )
    return sorted(measured, key=lambda candidate: -(candidate.measured_per_s or 0.0))


def against(best: Candidate, others: Sequence[Candidate]) -> str:
    """In words: what was found against the best of a grid, and against the default."""
    goodput, most = best.measured_per_s or 0.0, others[0].measured_per_s or 0.0
    told = f"{describe(best.plan)}: {goodput:.2f}, {goodput / max(most, 1e-9):.2f} of the grid's best"
    for candidate in others:
        if candidate.plan == replace(DEFAULT, num_threads=candidate.plan.num_threads):
            default = max(candidate.measured_per_s or 0.0, 1e-9)
            told += f" and {goodput / default:.2f} of the default ({describe(candidate.plan)})"
    return told + "."


def _show(title: str, chosen: Sequence[Candidate], console: Console) -> None:
    table = Table(title=title)
    for column in ("configuration", "simulated", "measured"):
        table.add_column(column, justify="left" if column == "configuration" else "right")
    for candidate in chosen:
        measured = "" if candidate.measured_per_s is None else f"{candidate.measured_per_s:.2f}"
        table.add_row(describe(candidate.plan), f"{candidate.predicted_per_s:.2f}", measured)
    console.print(table)


def _json(
    found: Sequence[Candidate], chosen: Sequence[Candidate], others: Sequence[Candidate], wish: Wish
) -> Mapping[str, object]:
    def told(candidate: Candidate) -> dict[str, object]:
        runs = [asdict(run.summary) for run in candidate.runs]
        rates = {"predicted_per_s": candidate.predicted_per_s, "measured_per_s": candidate.measured_per_s}
        return {"options": serve_options(candidate.plan), **rates, "runs": runs}

    return {
        "slo": asdict(wish.slo),
        "attainment": wish.attainment,
        "machine": report.machine(),
        "chosen": [told(candidate) for candidate in chosen],
        "grid": [told(candidate) for candidate in others],
        "simulated": [told(candidate) for candidate in found],
    }
