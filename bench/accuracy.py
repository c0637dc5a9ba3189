"""How well the simulator predicts this machine: `tandem bench accuracy`.

The same traffic on one-process engines and on a tandem, served and simulated. Shown side by side: what users feel, by
how much the prediction is off, and whether it names the same winner."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import report
from bench.serve import Asked, Target, measure, progress_bar
from bench.simulate import simulate
from bench.simulation.cluster import Plan
from bench.simulation.costs import Profile
from bench.summary import Slo, Summary
from bench.tune import as_arguments, describe
from tandem.served import served

COMPARED = {"first_token": "first token", "per_token": "mean gap", "gap": "gaps"}
PARTS = ("p50", "p90")


@dataclass(frozen=True, slots=True)
class Pair:
    """One configuration at one rate: measured and simulated."""

    name: str
    rate_per_s: float
    measured: Summary
    simulated: Summary

    def errors(self) -> dict[str, float]:
        """Of the prediction, relative: 0.1 is a tenth too much. Attainment's is in parts of all requests."""
        found = {
            f"{words} {part}": _value(self.simulated, name, part) / _value(self.measured, name, part) - 1.0
            for name, words in COMPARED.items()
            for part in PARTS
            if _value(self.measured, name, part)
        }
        return {**found, "attainment": self.simulated.attainment - self.measured.attainment}


def _value(summary: Summary, name: str, part: str) -> float:
    value: float = getattr(getattr(summary, name), part)
    return value


async def run(
    profile: Profile,
    plans: Sequence[Plan],
    model: str,
    options: Sequence[str],
    asked: Asked,
    slo: Slo,
    json_path: Path | None = None,
) -> list[Pair]:
    """Every plan at every rate, shown; the file if asked for."""
    pairs = []
    for plan in plans:
        command = [model, "--max-queue", "600", *options, *as_arguments(plan)]
        async with served(command) as addresses:
            with progress_bar(sys.stderr.isatty()) as bar:
                for traffic in asked.traffics():
                    target = Target(addresses["http"])
                    real = await measure(target, traffic, slo, asked, describe(plan), bar)
                    made = simulate(plan, profile, traffic, slo)
                    pairs.append(Pair(describe(plan), traffic.rate_per_s, real.summary, made.summary))
    _show(pairs)
    if json_path is not None:
        told = [{**asdict(pair), "errors": pair.errors()} for pair in pairs]
        report.write(
            json_path, json.dumps({"machine": report.machine(), "slo": asdict(slo), "pairs": told}, indent=1)
        )
    return pairs


def plans_of(profile: Profile, chunks: Sequence[int], pace_s: float, borrows: bool) -> list[Plan]:
    """A tandem of one and one, and one engine over all cores with each of these chunk sizes."""
    threads = sorted(profile.engines)
    base = Plan(is_one_host=True, max_queue_s=600.0, num_threads=threads[0])
    colocated = replace(base, num_colocated=1, num_threads=threads[-1])
    tandem = replace(base, pace_s=pace_s, borrows=borrows)
    return [tandem, *(replace(colocated, token_budget=chunk) for chunk in chunks)]


def winners(pairs: Sequence[Pair]) -> Mapping[float, tuple[str, str]]:
    """By rate: who attains most, as measured and as simulated; the first of equals."""
    found = {}
    for rate in dict.fromkeys(pair.rate_per_s for pair in pairs):
        there = [pair for pair in pairs if pair.rate_per_s == rate]
        real = max(there, key=lambda pair: pair.measured.attainment)
        made = max(there, key=lambda pair: pair.simulated.attainment)
        found[rate] = real.name, made.name
    return found


def _show(pairs: Sequence[Pair]) -> None:
    console = Console(width=max(120, Console().width))
    for pair in pairs:
        table = Table(title=f"{pair.name}, {pair.rate_per_s:.3g} a second: milliseconds")
        for column in ("", "measured", "simulated", "off by"):
            table.add_column(column, justify="right" if column else "left")
        errors = pair.errors()
        for name, words in COMPARED.items():
            for part in PARTS:
                real, made = (
                    _value(summary, name, part) * 1e3 for summary in (pair.measured, pair.simulated)
                )
                table.add_row(
                    f"{words} {part}",
                    f"{real:.1f}",
                    f"{made:.1f}",
                    f"{errors.get(f'{words} {part}', 0):+.0%}",
                )
        parts = (f"{summary.attainment:.1%}" for summary in (pair.measured, pair.simulated))
        table.add_row("met the SLO", *parts, f"{100 * errors['attainment']:+.1f} points")
        console.print(table)
    for rate, (real_winner, made_winner) in winners(pairs).items():
        verdict = "the same winner" if real_winner == made_winner else "another winner"
        console.print(
            f"At {rate:.3g} a second {verdict}: measured {real_winner}; simulated {made_winner}.",
            markup=False,
        )
