"""Pictures of runs as SVG, with labelled axes and units. Knows no servers and no HTML."""

import io
from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.client import Outcome
from bench.summary import LATENCIES, Slo

matplotlib.use("svg")
matplotlib.rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "tandem",
        "font.size": 10,
        "axes.grid": True,
        "grid.alpha": 0.3,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)
SIZE_IN = (6.4, 3.6)
COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")

Runs = Mapping[str, Sequence[Outcome]]
"""Outcomes by the name of what was measured."""


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(SIZE_IN, layout="constrained")
    return figure, figure.add_subplot()


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue().partition("<svg")[1] + out.getvalue().partition("<svg")[2]


def _values(outcomes: Sequence[Outcome], latency: str) -> list[float]:
    whole = [outcome for outcome in outcomes if outcome.is_whole]
    if latency == "gap":
        return [gap for outcome in whole for gap in outcome.gaps_s]
    several = [outcome for outcome in whole if outcome.num_tokens > 1]
    match latency:
        case "first_token":
            return [outcome.first_token_s for outcome in whole]
        case "per_token":
            return [outcome.per_token_s for outcome in several]
        case "worst_gap":
            return [outcome.worst_gap_s for outcome in several]
        case _:
            return [outcome.took_s for outcome in whole]


def distribution(runs: Runs, latency: str, limit_s: float | None = None) -> str:
    """How many of the values are at most so many milliseconds, for each run; a line where the SLO is."""
    figure, axes = _figure()
    for (name, outcomes), color in zip(runs.items(), COLORS * 8, strict=False):
        values = sorted(_values(outcomes, latency))
        if values:
            parts = [100 * (index + 1) / len(values) for index in range(len(values))]
            axes.step([value * 1e3 for value in values], parts, where="post", label=name, color=color)
    if limit_s is not None:
        axes.axvline(limit_s * 1e3, color="#111827", linestyle="--", linewidth=1, label="SLO")
    axes.set(
        title=LATENCIES[latency].capitalize(), xlabel="milliseconds", ylabel="% at most that", ylim=(0, 101)
    )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if axes.lines:
        axes.legend(fontsize=8, loc="lower right")
    return _svg(figure)


def over_time(runs: Runs, latency: str = "first_token") -> str:
    """Each request where it was sent, by how long its first token or all of it took; crosses were not answered."""
    figure, axes = _figure()
    for (name, outcomes), color in zip(runs.items(), COLORS * 8, strict=False):
        whole = [outcome for outcome in outcomes if outcome.is_whole]
        took = [(o.first_token_s if latency == "first_token" else o.took_s) * 1e3 for o in whole]
        axes.scatter([o.sent_s for o in whole], took, s=10, alpha=0.7, color=color, label=name)
        lost = [o.sent_s for o in outcomes if not o.is_whole]
        if lost:
            axes.scatter(
                lost, [0.0] * len(lost), marker="x", s=24, color=color, label=f"{name}: not answered"
            )
    axes.set(
        title=f"{LATENCIES[latency].capitalize()} of each request",
        xlabel="sent after, seconds",
        ylabel="milliseconds",
    )
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    return _svg(figure)


def attainment(points: Mapping[str, Sequence[tuple[float, float]]], wanted: float) -> str:
    """The part of requests that met the SLO by the rate at which they came, for each system."""
    figure, axes = _figure()
    for (name, pairs), color in zip(points.items(), COLORS * 8, strict=False):
        rates, parts = zip(*sorted(pairs), strict=True)
        axes.plot(rates, [100 * part for part in parts], marker="o", color=color, label=name)
    axes.axhline(100 * wanted, color="#111827", linestyle="--", linewidth=1, label=f"{wanted:.0%}")
    axes.set(title="SLO attainment", xlabel="requests a second", ylabel="% of requests", ylim=(0, 103))
    axes.legend(fontsize=8, loc="lower left")
    return _svg(figure)


def curve(
    points: Mapping[str, Sequence[tuple[float, float]]], title: str, xlabel: str, ylabel: str, logs: str = ""
) -> str:
    """Any values by others, a line each; `logs` names the logarithmic axes."""
    figure, axes = _figure()
    for (name, pairs), color in zip(points.items(), COLORS * 8, strict=False):
        xs, ys = zip(*sorted(pairs), strict=True)
        axes.plot(xs, ys, marker="o", color=color, label=name)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    if "x" in logs:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if "y" in logs:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    return _svg(figure)


def slo_limits(slo: Slo) -> dict[str, float | None]:
    """By the latency that each bounds."""
    return {
        "first_token": slo.first_token_s,
        "per_token": slo.per_token_s,
        "worst_gap": slo.gap_s,
        "total": slo.total_s,
    }
