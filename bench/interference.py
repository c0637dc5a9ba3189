"""What long prompts do to streams beside them: `tandem bench interference`.

A few steady streams, alone first; then again while long prompts arrive one after the other. Of each system: the gaps
between the streams' tokens without and with prompts, over the time in which there are any, and how long the prompts
waited for their first tokens. Chunked prefill trades one for the other: the curve is drawn.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import plots, report
from bench.client import Outcome
from bench.load import open_loop
from bench.serve import Target, progress_bar
from bench.summary import Latency
from bench.systems import TANDEM, System
from bench.traffic import Planned, Traffic
from core.errors import EngineFailed

LONG_OUTPUT = 2
"""So that a long prompt's blocks travel as well."""
FAIR = 1.2
"""A system is compared on gaps at the largest chunk with which its prompts wait no longer than that part of ours."""


@dataclass(frozen=True, slots=True)
class Scene:
    """`num_streams` of `stream_output` tokens, and `num_prompts` of `prompt_tokens`, `apart_s` seconds apart from
    `after_s` on."""

    num_streams: int = 4
    stream_output: int = 1000
    num_prompts: int = 6
    prompt_tokens: int = 1500
    apart_s: float = 4.0
    after_s: float = 4.0
    stream_prompt: int = 32
    seed: int = 1

    def traffic(self, run: int, has_prompts: bool) -> Traffic:
        streams = [Planned(0.0, self.stream_prompt, self.stream_output) for _ in range(self.num_streams)]
        moments = [self.after_s + self.apart_s * index for index in range(self.num_prompts)]
        prompts = [Planned(at_s, self.prompt_tokens, LONG_OUTPUT) for at_s in moments if has_prompts]
        return Traffic("streams and prompts" if has_prompts else "streams", (*streams, *prompts), run=run)


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds. `quiet` and `beside` are the streams' gaps without and with prompts, `worst` each stream's longest
    with them, `prompt` their times to first token."""

    quiet: Latency
    beside: Latency
    worst: Latency
    prompt: Latency

    @property
    def stretch(self) -> float:
        """What prompts make of the streams' p99 gap."""
        return self.beside.p99 / self.quiet.p99


def figures(scene: Scene, quiet: Sequence[Outcome], outcomes: Sequence[Outcome]) -> Figures:
    """Raises EngineFailed when a request was not answered whole: nothing is measured then."""
    broken = [f"{o.status} {o.error}" for o in (*quiet, *outcomes) if not o.is_whole]
    if broken:
        raise EngineFailed(f"{len(broken)} requests were not answered whole: {broken[0]}")
    streams, prompts = outcomes[: scene.num_streams], outcomes[scene.num_streams :]
    start_s = min(prompt.sent_s for prompt in prompts)
    end_s = max(prompt.sent_s + prompt.took_s for prompt in prompts)
    each = [stream.gaps_between(start_s, end_s) for stream in streams]
    if not all(each):
        raise EngineFailed("a stream had ended before the prompts came: ask for longer ones")
    return Figures(
        Latency.of([gap for stream in quiet for gap in stream.gaps_s]),
        Latency.of([gap for stream in each for gap in stream]),
        Latency.of([max(stream) for stream in each]),
        Latency.of([prompt.first_token_s for prompt in prompts]),
    )


async def measure(target: Target, scene: Scene, name: str) -> Figures:
    client = target.client()
    try:
        await client.find_model()
        with progress_bar(sys.stderr.isatty()) as bar:
            task = bar.add_task(name)
            await open_loop(client, _short(scene.traffic(0, has_prompts=True)), scene.seed)
            quiet = await open_loop(client, scene.traffic(1, has_prompts=False), scene.seed)
            outcomes = await open_loop(
                client, scene.traffic(2, has_prompts=True), scene.seed, lambda _: bar.advance(task)
            )
    finally:
        await client.close()
    return figures(scene, quiet, outcomes)


def _short(traffic: Traffic) -> Traffic:
    """The same prompts at once and few tokens: everything has been used once before anything is measured."""
    requests = tuple(Planned(0.0, request.num_prompt, 4) for request in traffic.requests)
    return Traffic(traffic.name, requests, run=traffic.run)


async def run(
    systems: Sequence[System], scene: Scene, json_path: Path | None = None, html_path: Path | None = None
) -> Mapping[str, Figures]:
    results: dict[str, Figures] = {}
    for system in systems:
        async with system.start() as target:
            results[system.name] = await measure(target, scene, system.name)
    lines = verdict(results)
    console = Console(width=max(110, Console().width))
    _show(results, lines, console)
    if json_path is not None:
        told = {"scene": asdict(scene), "machine": report.machine(), "verdict": lines}
        told["systems"] = {name: asdict(found) for name, found in results.items()}
        report.write(json_path, json.dumps(told, indent=1))
    if html_path is not None:
        report.write(html_path, as_html(results, lines))
    return results


def rows_of(results: Mapping[str, Figures]) -> report.Rows:
    """A row for each system, milliseconds."""
    return [
        (
            name,
            [
                *(f"{value * 1e3:.1f}" for value in (found.quiet.p50, found.quiet.p99)),
                *(f"{value * 1e3:.1f}" for value in (found.beside.p50, found.beside.p99, found.worst.max)),
                f"{found.stretch:.2f}",
                f"{found.prompt.p50 * 1e3:.0f}",
            ],
        )
        for name, found in results.items()
    ]


COLUMNS = (
    "gap p50 alone, ms",
    "gap p99 alone, ms",
    "gap p50 with prompts, ms",
    "gap p99 with prompts, ms",
    "worst gap, ms",
    "p99 with / alone",
    "prompt's first token p50, ms",
)


def _show(results: Mapping[str, Figures], lines: Sequence[str], console: Console) -> None:
    table = Table(title="streams beside long prompts")
    for column in ("", *COLUMNS):
        table.add_column(column, justify="right" if column else "left")
    for name, cells in rows_of(results):
        table.add_row(name, *cells)
    console.print(table)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def verdict(results: Mapping[str, Figures]) -> list[str]:
    """The tandem's p99 gap beside prompts: to its own without, and to that of each other."""
    if TANDEM not in results:
        return []
    own = results[TANDEM]
    lines = [f"Beside long prompts the tandem's p99 gap is {own.stretch:.2f} of its own without them."]
    others = {name: found for name, found in results.items() if name != TANDEM}
    for name, found in others.items():
        ratio, prompts = own.beside.p99 / found.beside.p99, found.prompt.p50 / own.prompt.p50
        lines.append(
            f"It is {ratio:.2f} of that of {name}, whose prompts' first tokens take {prompts:.2f} of the tandem's."
        )
    fair = {name: found for name, found in others.items() if found.prompt.p50 <= FAIR * own.prompt.p50}
    if others and not fair:
        lines.append(f"No other answers long prompts within {FAIR} of the tandem's time to first token.")
    return lines


def as_html(results: Mapping[str, Figures], lines: Sequence[str]) -> str:
    points = {name: [(found.prompt.p50 * 1e3, found.beside.p99 * 1e3)] for name, found in results.items()}
    title = "What a long prompt's first token costs the streams beside it"
    labels = (
        "long prompt's first token, p50, milliseconds",
        "streams' gap beside prompts, p99, milliseconds",
    )
    drawn = [plots.curve(points, title, *labels, logs="y")]
    return report.page("Streams beside long prompts", lines, {"Systems": (COLUMNS, rows_of(results))}, drawn)
