"""A run as one HTML file that needs nothing else, and as tables for the terminal. Knows no servers."""

import html
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import plots
from bench.plots import Runs
from bench.summary import LATENCIES, Slo, Summary

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #111827; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.verdict { border-left: 4px solid #2563eb; background: #eff6ff; padding: .6rem 1rem; }
.verdict p { margin: .3rem 0; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #e5e7eb; text-align: right; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 2px solid #9ca3af; vertical-align: bottom; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem; }
.plots svg { width: 100%; height: auto; }
.wide { overflow-x: auto; }
footer { color: #6b7280; font-size: .85rem; margin-top: 2rem; }
"""

Rows = Sequence[tuple[str, Sequence[str]]]
"""The name of each row and its cells."""


def rows_of(summaries: Mapping[str, Summary]) -> Rows:
    """What a table shows of runs, a column each: counts, rates, and latencies in milliseconds."""
    each = list(summaries.values())
    rows: list[tuple[str, Sequence[str]]] = [
        ("requests", [f"{s.num_asked}" for s in each]),
        ("refused / failed", [f"{s.num_refused} / {s.num_failed}" for s in each]),
        ("requests a second", [f"{s.asked_per_s:.2f}" for s in each]),
        ("met the SLO, %", [f"{100 * s.attainment:.1f}" for s in each]),
        ("met it, a second", [f"{s.met_per_s:.2f}" for s in each]),
        ("prompt tokens a second", [f"{s.prompt_tokens_per_s:.0f}" for s in each]),
        ("output tokens a second", [f"{s.output_tokens_per_s:.0f}" for s in each]),
    ]
    for name, words in LATENCIES.items():
        for part in ("p50", "p90", "p99"):
            values = [getattr(getattr(s, name), part) * 1e3 for s in each]
            rows.append((f"{words}, {part}, ms", [f"{value:.1f}" for value in values]))
    return rows


def show(title: str, summaries: Mapping[str, Summary], console: Console) -> None:
    table = Table(title=title)
    for column in ("", *summaries):
        table.add_column(column, justify="right" if column else "left")
    for name, cells in rows_of(summaries):
        table.add_row(name, *cells)
    console.print(table)


def plots_of(runs: Runs, slo: Slo) -> list[str]:
    """Distributions of what users feel, and first tokens over time."""
    limits = plots.slo_limits(slo)
    drawn = [plots.distribution(runs, name, limits.get(name)) for name in LATENCIES]
    return [*drawn, plots.over_time(runs)]


def page(
    title: str,
    verdict: Sequence[str],
    tables: Mapping[str, tuple[Sequence[str], Rows]],
    drawn: Sequence[str],
    notes: Sequence[str] = (),
) -> str:
    """`tables` by their heading: columns, then rows. `drawn` are SVGs; all else is text and is escaped."""
    parts = [f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title>"]
    parts += [f"<style>{STYLE}</style><h1>{html.escape(title)}</h1>"]
    if verdict:
        parts.append(
            f"<div class='verdict'>{''.join(f'<p>{html.escape(line)}</p>' for line in verdict)}</div>"
        )
    for heading, (columns, rows) in tables.items():
        parts.append(f"<h2>{html.escape(heading)}</h2><div class='wide'>{_table(columns, rows)}</div>")
    parts.append(f"<div class='plots'>{''.join(f'<figure>{svg}</figure>' for svg in drawn)}</div>")
    parts += [f"<p>{html.escape(note)}</p>" for note in notes]
    parts.append(f"<footer>{html.escape(machine())}</footer></html>")
    return "\n".join(parts)


def _table(columns: Sequence[str], rows: Rows) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in ("", *columns))
    body = "".join(
        f"<tr><td>{html.escape(name)}</td>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"
        for name, cells in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def machine() -> str:
    cores = len(os.sched_getaffinity(0))
    return f"{platform.machine()}, {cores} cores, load {os.getloadavg()[0]:.1f}; figures compare within one run only"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def as_json(summary: Summary) -> dict[str, object]:
    return asdict(summary)
