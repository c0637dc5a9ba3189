"""Measures any OpenAI-compatible server under traffic: `tandem bench serve`."""

import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import plots, report
from bench.client import Endpoint, OpenAIClient, Outcome, ready
from bench.load import closed_loop, open_loop
from bench.summary import ATTAINMENT, GOODPUT, Slo, Summary, goodput_per_s, summarize
from bench.traffic import TOKEN_IDS, Lengths, Traffic, read_trace, synthetic


@dataclass(frozen=True, slots=True)
class Asked:
    """What traffic there is to be: a trace, or synthetic. `rates` are requests a second, one run each; with a
    `concurrency` it is a closed loop instead. A trace keeps its own rate unless one is given."""

    num_requests: int | None = None
    lengths: Lengths = field(default_factory=lambda: Lengths(256, 64))
    trace: Path | None = None
    divisor: int = 1
    rates: tuple[float, ...] = ()
    concurrency: int | None = None
    burstiness: float = 1.0
    seed: int = 1
    vocab_size: int = TOKEN_IDS.stop

    def traffics(self) -> list[Traffic]:
        """One for each run. Raises ValueError for what is no traffic."""
        if self.trace is None:
            rates = self.rates or (math.inf,)
            made = [self._synthetic(rate) for rate in rates]
        else:
            whole = read_trace(self.trace)
            base = whole.first(self.num_requests or len(whole.requests)).divided(self.divisor)
            made = [base.at_rate(rate) for rate in self.rates] or [base]
        return [replace(traffic.of_vocabulary(self.vocab_size), run=run) for run, traffic in enumerate(made)]

    def _synthetic(self, rate_per_s: float) -> Traffic:
        rng = random.Random(self.seed)
        return synthetic(self.num_requests or 100, rate_per_s, self.burstiness, self.lengths, rng)


@dataclass(frozen=True, slots=True)
class Target:
    """The server."""

    url: str
    model: str = ""
    endpoint: Endpoint = Endpoint.COMPLETIONS
    api_key: str = "none"
    ignores_eos: bool = True

    def client(self) -> OpenAIClient:
        return OpenAIClient(self.url, self.model, self.endpoint, self.api_key, self.ignores_eos)


@dataclass(frozen=True, slots=True)
class Run:
    """One traffic at one server, measured."""

    name: str
    traffic: str
    summary: Summary
    outcomes: list[Outcome]


def progress_bar(is_shown: bool = True) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not is_shown, transient=True)


async def measure(
    target: Target, traffic: Traffic, slo: Slo, asked: Asked, name: str, bar: Progress | None = None
) -> Run:
    """One request that does not count, then the traffic. Raises Unavailable when the server does not answer."""
    client = target.client()
    bar = bar or progress_bar(is_shown=False)
    task = bar.add_task(name, total=len(traffic.requests))
    try:
        await client.find_model()
        await ready(client, [traffic.token_ids.start + 1] * 8)
        if asked.concurrency is None:
            outcomes = await open_loop(client, traffic, asked.seed, lambda _: bar.advance(task))
            rate = traffic.rate_per_s if traffic.rate_per_s < math.inf else None
        else:
            outcomes = await closed_loop(
                client, traffic, asked.concurrency, asked.seed, lambda _: bar.advance(task)
            )
            rate = None
    finally:
        await client.close()
    return Run(name, traffic.name, summarize(outcomes, slo, rate), outcomes)


async def run(
    target: Target,
    asked: Asked,
    slo: Slo,
    attainment: float = ATTAINMENT,
    json_path: Path | None = None,
    html_path: Path | None = None,
) -> list[Run]:
    """Every rate, shown as a table; the files if asked for."""
    with progress_bar(sys.stderr.isatty()) as bar:
        runs = [
            await measure(target, traffic, slo, asked, _name(asked, traffic), bar)
            for traffic in asked.traffics()
        ]
    console = Console(width=max(100, Console().width))
    report.show(f"{target.url}: {runs[0].traffic}", {run.name: run.summary for run in runs}, console)
    lines = conclusions(runs, slo, attainment)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    if json_path is not None:
        report.write(json_path, json.dumps(as_json(target, asked, slo, runs, lines), indent=1, default=str))
    if html_path is not None:
        report.write(html_path, as_html(target, slo, runs, lines, attainment))
    return runs


def _name(asked: Asked, traffic: Traffic) -> str:
    if asked.concurrency is not None:
        return f"{asked.concurrency} at a time"
    return f"{traffic.rate_per_s:.3g} a second" if traffic.rate_per_s < math.inf else "all at once"


def conclusions(runs: Sequence[Run], slo: Slo, attainment: float) -> list[str]:
    """Goodput with its definition, and what went wrong."""
    lines = []
    if slo != Slo():
        lines.append(GOODPUT.format(attainment=attainment, slo=slo))
        points = [(run.summary.asked_per_s, run.summary.attainment) for run in runs]
        best = goodput_per_s(points, attainment)
        is_open_ended = all(reached >= attainment for _, reached in points)
        more = (
            "at least, no rate that was tried is too much"
            if is_open_ended
            else "interpolated between the rates tried"
        )
        lines.append(f"Goodput: {best:.2f} requests a second ({more}).")
    for run in runs:
        errors = {outcome.error for outcome in run.outcomes if not outcome.is_whole and outcome.error}
        if errors:
            lines.append(f"{run.name}: not answered whole, for example: {sorted(errors)[0]}")
    return lines


def as_json(
    target: Target, asked: Asked, slo: Slo, runs: Sequence[Run], lines: Sequence[str]
) -> dict[str, object]:
    told: dict[str, object] = {
        "url": target.url,
        "asked": asdict(asked),
        "slo": asdict(slo),
        "conclusions": list(lines),
    }
    told["machine"] = report.machine()
    told["runs"] = [
        {
            "name": run.name,
            "traffic": run.traffic,
            "summary": report.as_json(run.summary),
            "requests": [asdict(outcome) for outcome in run.outcomes],
        }
        for run in runs
    ]
    return told


def as_html(target: Target, slo: Slo, runs: Sequence[Run], lines: Sequence[str], attainment: float) -> str:
    outcomes = {run.name: run.outcomes for run in runs}
    drawn = report.plots_of(outcomes, slo)
    if len(runs) > 1:
        points = {target.url: [(run.summary.asked_per_s, run.summary.attainment) for run in runs]}
        drawn.insert(0, plots.attainment(points, attainment))
    table = ([run.name for run in runs], report.rows_of({run.name: run.summary for run in runs}))
    return report.page(f"{target.url} under load", lines, {runs[0].traffic: table}, drawn)
