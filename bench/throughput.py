"""How much work an engine gets through when all of it is there at once: `tandem bench throughput`, in one process."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import plots, report
from bench.offline import Engine, TimedLLM, check_positive, opened
from bench.report import Rows
from bench.serve import Asked
from bench.traffic import Traffic
from core.sampling import SamplingParams
from engine.engine_geometry import EngineGeometry

COLUMNS = ("prompts", "outputs", "together")
MAX_POINTS = 200


@dataclass(frozen=True, slots=True)
class Plan:
    """Who is to do how much. When a trace's requests came is of no interest: all of them come at once."""

    engine: Engine
    asked: Asked

    def __post_init__(self) -> None:
        asked, lengths = self.asked, self.asked.lengths
        check_positive(prompt=lengths.num_prompt, output=lengths.num_output, divide=asked.divisor)
        if asked.num_requests is not None:
            check_positive(requests=asked.num_requests)
        if not 0 <= lengths.spread <= 1:
            raise ValueError(f"--spread must be between 0 and 1, got {lengths.spread}")


@dataclass(frozen=True, slots=True)
class Done:
    """What was done in how long. `num_cached` of the prompts' tokens came from the prefix cache; `moments_s` are
    those of the output's tokens since the start, in order."""

    traffic: str
    num_requests: int
    num_prompt: int
    num_cached: int
    num_output: int
    took_s: float
    moments_s: tuple[float, ...]

    @property
    def rates(self) -> dict[str, float]:
        """Each a second."""
        names = ("requests", "prompt_tokens", "output_tokens", "total_tokens")
        counts = (self.num_requests, self.num_prompt, self.num_output, self.num_prompt + self.num_output)
        return {f"{name}_per_s": count / self.took_s for name, count in zip(names, counts, strict=True)}


def run(plan: Plan, json_path: Path | None = None, html_path: Path | None = None) -> Done:
    """Measure, print a table, write the files. Raises ModelLoadError, and ValueError naming the option at fault."""
    done = measure(plan)
    rows, lines = rows_of(done), _lines(done)
    console = Console(width=max(100, Console().width))
    table = Table(title=done.traffic)
    for column in ("", *COLUMNS):
        table.add_column(column, justify="right" if column else "left")
    for name, cells in rows:
        table.add_row(name, *cells)
    console.print(table)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    if json_path is not None:
        report.write(json_path, json.dumps(as_json(plan, done), indent=1, default=str))
    if html_path is not None:
        page = report.page("Throughput", lines, {done.traffic: (COLUMNS, rows)}, [_curve(done)])
        report.write(html_path, page)
    return done


def measure(plan: Plan) -> Done:
    """One short request that does not count, then all of them."""
    geometry = EngineGeometry(plan.engine.config())
    traffic = _traffic(plan, geometry)
    with opened(plan.engine) as llm:
        llm.generate([[traffic.token_ids.start] * 8], SamplingParams(max_tokens=2, temperature=0.0))
        llm.take_moments()
        return _generate(llm, traffic, plan.asked.seed)


def _traffic(plan: Plan, geometry: EngineGeometry) -> Traffic:
    """Of the model's vocabulary, and none of it longer than its context."""
    try:
        (whole, *_) = plan.asked.traffics()
    except ValueError as error:
        raise ValueError(f"--trace: {error}" if plan.asked.trace else str(error)) from error
    longest = max(planned.num_prompt + planned.num_output for planned in whole.requests)
    if longest > geometry.context_len:
        option = "--trace (--divide makes it shorter)" if plan.asked.trace else "--prompt and --output"
        raise ValueError(
            f"{option}: a request has {longest} tokens, the model's context is {geometry.context_len}"
        )
    return whole.of_vocabulary(geometry.model.vocab_size)


def _generate(llm: TimedLLM, traffic: Traffic, seed: int) -> Done:
    prompts = [traffic.prompt(index, seed) for index in range(len(traffic.requests))]
    params = [SamplingParams(max_tokens=each.num_output, temperature=0.0) for each in traffic.requests]
    began_s = time.perf_counter()
    completions = llm.generate(prompts, params)
    took_s = time.perf_counter() - began_s
    moments = sorted(moment - began_s for own in llm.take_moments() for moment in own)
    return Done(
        traffic.name.removesuffix(", inf a second, Poisson"),
        len(prompts),
        sum(map(len, prompts)),
        sum(completion.num_cached_tokens for completion in completions),
        sum(len(completion.token_ids) for completion in completions),
        took_s,
        tuple(moments),
    )


def rows_of(done: Done) -> Rows:
    rates, counts = done.rates, (done.num_prompt, done.num_output, done.num_prompt + done.num_output)
    names = ("prompt_tokens_per_s", "output_tokens_per_s", "total_tokens_per_s")
    return [
        ("tokens", [f"{count}" for count in counts]),
        ("tokens a second", [f"{rates[name]:.1f}" for name in names]),
    ]


def _lines(done: Done) -> list[str]:
    cached = f" {done.num_cached} of the prompts' tokens were cached." if done.num_cached else ""
    rate = done.rates["requests_per_s"]
    return [f"{done.num_requests} requests in {done.took_s:.2f} s, {rate:.2f} a second.{cached}"]


def as_json(plan: Plan, done: Done) -> dict[str, object]:
    return {"plan": asdict(plan), "machine": report.machine(), "done": asdict(done), "rates": done.rates}


def _curve(done: Done) -> str:
    """Where it is steep the batch is full; the flat end is that of the longest."""
    return plots.curve(
        {"output tokens": _thinned(done.moments_s)}, "What was there by then", "seconds", "tokens"
    )


def _thinned(moments_s: Sequence[float]) -> list[tuple[float, float]]:
    points = [(moment_s, float(number)) for number, moment_s in enumerate(moments_s, 1)]
    return [(0.0, 0.0), *points[:: max(1, len(points) // MAX_POINTS)], points[-1]]
