"""How long one batch takes when nothing else runs: `tandem bench latency`, in one process.

Each repeat asks other prompts, and nothing is cached, so that every one computes them whole."""

import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from bench import plots, report
from bench.offline import Engine, TimedLLM, check_positive, opened
from bench.report import Rows
from bench.summary import Latency
from core.sampling import SamplingParams
from engine.engine_geometry import EngineGeometry

COLUMNS = ("mean", "p50", "p90", "p99", "max")


@dataclass(frozen=True, slots=True)
class Plan:
    """`batch` prompts at once, of `prompt` tokens each, for which `output` tokens each are generated; so often."""

    engine: Engine
    batch: int = 1
    prompt: int = 256
    output: int = 64
    repeats: int = 10

    def __post_init__(self) -> None:
        check_positive(batch=self.batch, prompt=self.prompt, output=self.output, repeats=self.repeats)


@dataclass(frozen=True, slots=True)
class Repeat:
    """One batch. `first_token_s`: until each sequence had its first; `whole_s`: until the last token of all. `gaps_s`
    are those before the second token and each that follows, a mean over the batch."""

    first_token_s: float
    whole_s: float
    gaps_s: tuple[float, ...]

    @property
    def per_token_s(self) -> float:
        return fmean(self.gaps_s) if self.gaps_s else 0.0

    @classmethod
    def of(cls, began_s: float, moments: Sequence[Sequence[float]]) -> "Repeat":
        """From the moments of every sequence's tokens."""
        first_token_s = max(own[0] for own in moments) - began_s
        whole_s = max(own[-1] for own in moments) - began_s
        places = zip(*moments, strict=True)
        means = [fmean(place) for place in places]
        gaps_s = tuple(after - before for before, after in pairwise(means))
        return cls(first_token_s, whole_s, gaps_s)


def run(plan: Plan, json_path: Path | None = None, html_path: Path | None = None) -> list[Repeat]:
    """Measure, print a table, write the files. Raises ModelLoadError, and ValueError naming the option at fault."""
    repeats = measure(plan)
    rows, title = rows_of(repeats, plan), _title(plan)
    console = Console(width=max(100, Console().width))
    table = Table(title=title)
    for column in ("", *COLUMNS):
        table.add_column(column, justify="right" if column else "left")
    for name, cells in rows:
        table.add_row(name, *cells)
    console.print(table)
    console.print(_rates(repeats, plan), markup=False, soft_wrap=True)
    if json_path is not None:
        report.write(json_path, json.dumps(as_json(plan, repeats), indent=1))
    if html_path is not None:
        tables = {f"Over {len(repeats)} repeats": (COLUMNS, rows)}
        drawn = [_curve(repeats)] if plan.output > 1 else []
        report.write(html_path, report.page(title, [_rates(repeats, plan)], tables, drawn))
    return repeats


def measure(plan: Plan) -> list[Repeat]:
    """One repeat that does not count, then the others."""
    config = plan.engine.config()
    geometry, room = EngineGeometry(config), plan.prompt + plan.output
    if room > geometry.context_len:
        raise ValueError(
            f"--prompt and --output are {room} tokens, the model's context is {geometry.context_len}"
        )
    num_blocks = plan.batch * (geometry.kv_spec.num_blocks_for(room) + 1)
    changes = {"max_batch": plan.batch, "num_blocks": num_blocks, "enable_prefix_cache": False}
    with opened(plan.engine, **changes) as llm:
        rng = random.Random(1)
        return [_repeat(llm, plan, rng) for _ in range(plan.repeats + 1)][1:]


def _repeat(llm: TimedLLM, plan: Plan, rng: random.Random) -> Repeat:
    ids = range(llm.geometry.model.vocab_size // 2)
    prompts = [rng.choices(ids, k=plan.prompt) for _ in range(plan.batch)]
    params = SamplingParams(max_tokens=plan.output, temperature=0.0)
    began_s = time.perf_counter()
    llm.generate(prompts, params)
    return Repeat.of(began_s, llm.take_moments())


def latencies(repeats: Sequence[Repeat]) -> dict[str, Latency]:
    """By the names of the JSON."""
    return {
        "first_token": Latency.of([repeat.first_token_s for repeat in repeats]),
        "per_token": Latency.of([repeat.per_token_s for repeat in repeats]),
        "whole": Latency.of([repeat.whole_s for repeat in repeats]),
    }


def rows_of(repeats: Sequence[Repeat], plan: Plan) -> Rows:
    """Milliseconds. What a single token would say of the gaps between tokens is left out."""
    words = {"first_token": "time to first token", "per_token": "each token after it", "whole": "whole"}
    found = latencies(repeats)
    names = [name for name in words if name != "per_token" or plan.output > 1]
    return [
        (f"{words[name]}, ms", [f"{getattr(found[name], column) * 1e3:.2f}" for column in COLUMNS])
        for name in names
    ]


def as_json(plan: Plan, repeats: Sequence[Repeat]) -> dict[str, object]:
    """Seconds."""
    told = {name: asdict(latency) for name, latency in latencies(repeats).items()}
    each = [asdict(repeat) | {"per_token_s": repeat.per_token_s} for repeat in repeats]
    return {"plan": asdict(plan), "machine": report.machine(), "latencies": told, "repeats": each}


def _title(plan: Plan) -> str:
    engine = plan.engine
    return (
        f"{plan.batch} x ({plan.prompt} + {plan.output} tokens), {engine.dtype}, {engine.weights}, "
        f"threads: {engine.threads}"
    )


def _rates(repeats: Sequence[Repeat], plan: Plan) -> str:
    """What the medians come to for the whole batch."""
    found = latencies(repeats)
    line = f"{plan.batch * plan.prompt / found['first_token'].p50:.0f} prompt tokens a second"
    if plan.output > 1:
        line += f", then {plan.batch / found['per_token'].p50:.1f} output tokens a second"
    return f"At the medians: {line}."


def _curve(repeats: Sequence[Repeat]) -> str:
    """Whether tokens get slower as the context grows."""
    places = zip(*(repeat.gaps_s for repeat in repeats), strict=True)
    points = [(float(place), fmean(gaps) * 1e3) for place, gaps in enumerate(places, 2)]
    return plots.curve({"mean of the repeats": points}, "Each token after the first", "token", "milliseconds")
