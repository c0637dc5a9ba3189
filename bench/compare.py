"""Does disaggregation pay here? `tandem bench compare`: the same traffic on the same cores, served in several ways.

One-process engines with chunked prefill, once for each chunk size; a tandem; and any other server. Each is asked the
same prompts at the same moments, one after the other, over every rate. The verdict says who won what, by which ratio
and at which load, also where the tandem loses.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from bench import plots, report
from bench.plots import Runs
from bench.serve import Asked, Run, Target, measure, progress_bar
from bench.summary import GOODPUT, LATENCIES, Slo, Summary, goodput_per_s
from bench.systems import TANDEM, System

CLOSE = 1.05
"""Ratios nearer to 1 than that are no difference."""

Results = Mapping[str, Sequence[Run]]
"""The runs of each system, in the order of the rates; the tandem's among them."""


async def run(
    systems: Sequence[System],
    asked: Asked,
    slo: Slo,
    attainment: float,
    json_path: Path | None = None,
    html_path: Path | None = None,
) -> Results:
    """Everything measured, shown and judged; the files if asked for."""
    results: dict[str, list[Run]] = {}
    for system in systems:
        async with system.start() as target:
            results[system.name] = await _measure_all(target, asked, slo, system.name)
    lines = verdict(results, slo, attainment)
    _show(results, lines)
    if json_path is not None:
        report.write(json_path, json.dumps(_json(asked, slo, results, lines), indent=1, default=str))
    if html_path is not None:
        report.write(html_path, as_html(results, slo, attainment, lines))
    return results


async def _measure_all(target: Target, asked: Asked, slo: Slo, name: str) -> list[Run]:
    with progress_bar(sys.stderr.isatty()) as bar:
        return [await measure(target, traffic, slo, asked, name, bar) for traffic in asked.traffics()]


def _show(results: Results, lines: Sequence[str]) -> None:
    console = Console(width=max(110, Console().width))
    for index, rate in enumerate(_rates(results)):
        table = {name: runs[index].summary for name, runs in results.items()}
        report.show(f"{rate:.3g} requests a second", table, console)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _rates(results: Results) -> list[float]:
    return [run.summary.asked_per_s for run in next(iter(results.values()))]


def verdict(results: Results, slo: Slo, attainment: float) -> list[str]:
    """In words: goodput by DistServe's definition if there is an SLO, then who is best at what and by how much."""
    lines: list[str] = []
    if slo != Slo():
        lines += _on_goodput(results, slo, attainment)
    for index, rate in enumerate(_rates(results)):
        lines += _at_rate(rate, {name: runs[index].summary for name, runs in results.items()})
    return lines


def _on_goodput(results: Results, slo: Slo, attainment: float) -> list[str]:
    reached = {
        name: goodput_per_s([(run.summary.asked_per_s, run.summary.attainment) for run in runs], attainment)
        for name, runs in results.items()
    }
    told = ", ".join(f"{name} {value:.2f}" for name, value in reached.items())
    lines = [GOODPUT.format(attainment=attainment, slo=slo), f"Goodput, requests a second: {told}."]
    other = max((name for name in reached if name != TANDEM), key=lambda name: reached[name], default=None)
    if other is not None and reached[TANDEM] and reached[other]:
        lines.append(f"{_winner(reached[TANDEM] / reached[other], other)} on goodput.")
    return lines


def _winner(ratio: float, other: str) -> str:
    if 1 / CLOSE <= ratio <= CLOSE:
        return f"The tandem and the best other ({other}) are equal"
    if ratio > 1:
        return f"The tandem wins by {ratio:.2f} over the best other ({other})"
    return f"The tandem loses by {1 / ratio:.2f} to the best other ({other})"


def _at_rate(rate: float, summaries: Mapping[str, Summary]) -> list[str]:
    """A sentence for each latency: the tandem against whoever of the others is best at it."""
    lines = []
    for name, words in LATENCIES.items():
        values = {system: getattr(summary, name).p99 for system, summary in summaries.items()}
        others = {system: value for system, value in values.items() if system != TANDEM and value}
        if not others or not values[TANDEM]:
            continue
        best = min(others, key=lambda system: others[system])
        told = f"{values[TANDEM] * 1e3:.0f} against {others[best] * 1e3:.0f} ms"
        winner = _winner(others[best] / values[TANDEM], best)
        lines.append(f"{winner} on {words}, p99, at {rate:.3g} a second ({told}).")
    return lines


def as_html(results: Results, slo: Slo, attainment: float, lines: Sequence[str]) -> str:
    rates = _rates(results)
    drawn = _by_rate(results, attainment) if len(rates) > 1 else []
    outcomes: Runs = {name: runs[-1].outcomes for name, runs in results.items()}
    drawn += report.plots_of(outcomes, slo)
    tables = {
        f"{rate:.3g} requests a second": (
            list(results),
            report.rows_of({name: runs[index].summary for name, runs in results.items()}),
        )
        for index, rate in enumerate(rates)
    }
    notes = [f"The distributions are those at {rates[-1]:.3g} requests a second."] if len(rates) > 1 else []
    return report.page("One process or a tandem?", lines, tables, drawn, notes)


def _by_rate(results: Results, attainment: float) -> list[str]:
    def points(value: str) -> dict[str, list[tuple[float, float]]]:
        return {
            name: [(run.summary.asked_per_s, _milliseconds(run.summary, value)) for run in runs]
            for name, runs in results.items()
        }

    reached = {
        name: [(run.summary.asked_per_s, run.summary.attainment) for run in runs]
        for name, runs in results.items()
    }
    titles = {value: f"{LATENCIES[value].capitalize()}, p99" for value in ("first_token", "gap")}
    curves = [
        plots.curve(points(value), title, "requests a second", "milliseconds")
        for value, title in titles.items()
    ]
    return [plots.attainment(reached, attainment), *curves]


def _milliseconds(summary: Summary, latency: str) -> float:
    p99: float = getattr(summary, latency).p99
    return p99 * 1e3


def _json(asked: Asked, slo: Slo, results: Results, lines: Sequence[str]) -> dict[str, object]:
    return {
        "asked": asdict(asked),
        "slo": asdict(slo),
        "verdict": list(lines),
        "machine": report.machine(),
        "systems": {
            name: [{"traffic": run.traffic, "summary": asdict(run.summary)} for run in runs]
            for name, runs in results.items()
        },
    }
