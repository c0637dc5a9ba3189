"""Where the milliseconds of a step go, and how far from this machine's limits each is: `tandem bench kernels`.

One core, and everything in one run, so that ratios mean something. An operation's limit is the time to read its
weights and KV at the rate at which memory streams, or to compute its products at the best rate that any product here
reaches, whichever is longer; `x limit` says how often that fits into its time."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench import limits, operations, steps
from bench.limits import Limits, best_s
from bench.operations import Work, packed
from bench.steps import StepTimes
from core.kv_spec import DType
from engine.batch import ForwardBatch
from engine.config import EngineConfig, WeightForm
from engine.engine_geometry import EngineGeometry
from engine.kv_pool import KVPool
from engine.llm import LLM
from engine.model import LlamaModel
from engine.runner import ModelRunner

STEP_BATCHES = (1, 32)
TEMPERATURES = (0.0, 1.0)
STEP_ROOM = 64
"""Tokens that a sequence may grow by while its steps are measured."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: a decode step of `batch` sequences `context` long, a prompt of `prompt` tokens."""

    model: str = "smollm2"
    dtype: DType = DType.BFLOAT16
    weights: WeightForm = WeightForm.STORED
    batch: int = 1
    context: int = 512
    prompt: int = 256
    repeats: int = 10

    def __post_init__(self) -> None:
        for name in ("batch", "context", "prompt", "repeats"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Row:
    """One operation of a pass. `limit_s` is None where nothing bounds it from below but its calls."""

    time_s: float
    share: float
    num_bytes: float
    flop: float
    limit_s: float | None

    @property
    def ratio(self) -> float | None:
        return self.time_s / self.limit_s if self.limit_s else None


@dataclass(frozen=True, slots=True)
class Pass:
    """`whole_s`: one call of the native decoder. Rows are measured one by one, so they add up to about it."""

    whole_s: float
    num_tokens: int
    rows: dict[str, Row]

    @property
    def sum_s(self) -> float:
        return sum(row.time_s for row in self.rows.values())

    @property
    def limit_s(self) -> float:
        return sum(row.limit_s or 0.0 for row in self.rows.values())


@dataclass(frozen=True, slots=True)
class Step:
    batch: int
    temperature: float
    times: StepTimes

    @property
    def outside_share(self) -> float:
        return self.times.outside_s / self.times.whole_s


@dataclass(frozen=True, slots=True)
class Report:
    plan: Plan
    load_before: float
    limits: Limits
    passes: dict[str, Pass]
    steps: list[Step]


def run(plan: Plan, json_path: Path | None = None) -> Report:
    """Measure, print tables, write JSON. Raises ModelLoadError, and ValueError without a native pass."""
    load = os.getloadavg()[0]
    torch.set_num_threads(1)
    llm = LLM(_engine_config(plan))
    try:
        report = _measure(plan, llm, load) if _has_native_pass(llm) else None
    finally:
        llm.close()
    if report is None:
        raise ValueError("no native pass for this model, dtype and machine: nothing to measure")
    show(report)
    if json_path is not None:
        json_path.write_text(json.dumps(as_json(report), indent=1), encoding="utf-8")
    return report


def _engine_config(plan: Plan) -> EngineConfig:
    """With a pool that holds the largest batch of all, and no prefix cache to share blocks."""
    largest = max(plan.batch, *STEP_BATCHES)
    config = EngineConfig(
        plan.model, plan.dtype, weights=plan.weights, max_batch=largest, enable_prefix_cache=False
    )
    size = config.block_size
    num_tokens = max(largest * (plan.context + STEP_ROOM + size), plan.prompt + size)
    context_len = EngineGeometry(config).context_len
    if max(plan.context + STEP_ROOM, plan.prompt) > context_len:
        raise ValueError(f"the model's context is {context_len} tokens, and steps need {STEP_ROOM} of them")
    return replace(config, num_blocks=-(-num_tokens // size))


def _runner(llm: LLM) -> ModelRunner:
    assert isinstance(llm.engine.runner, ModelRunner), llm.engine.runner
    return llm.engine.runner


def _has_native_pass(llm: LLM) -> bool:
    return _runner(llm)._model._native is not None


def _measure(plan: Plan, llm: LLM, load: float) -> Report:
    runner = _runner(llm)
    model, pool = runner._model, runner._pool
    pool.data.normal_()
    size = llm.config.block_size
    layer = model._layers[0]
    shapes = [packed(linear) for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    found = limits.measure(shapes, plan.repeats)
    decode = operations.decode_batch(plan.batch, plan.context, size)
    prefill = operations.prefill_batch(plan.prompt, size)
    passes = {
        "decode": measure_pass(model, pool, decode, found, plan.repeats),
        "prefill": measure_pass(model, pool, prefill, found, plan.repeats),
    }
    return Report(plan, load, found, passes, _measure_steps(plan, llm, model, pool))


def measure_pass(model: LlamaModel, pool: KVPool, batch: ForwardBatch, found: Limits, repeats: int) -> Pass:
    whole_s = best_s(lambda: model.forward(batch, pool), repeats)
    spent = operations.times(model, pool, batch, repeats)
    work = operations.least_work(model, pool, batch)
    total_s = sum(spent.values())
    rows = {name: _row(spent[name], total_s, work[name], found) for name in operations.OPERATIONS}
    return Pass(whole_s, len(batch.token_ids), rows)


def _row(time_s: float, total_s: float, work: Work, found: Limits) -> Row:
    limit_s = found.least_s(work.num_bytes, work.flop)
    return Row(time_s, time_s / total_s if total_s else 0.0, work.num_bytes, work.flop, limit_s or None)


def _measure_steps(plan: Plan, llm: LLM, model: LlamaModel, pool: KVPool) -> list[Step]:
    repeats = min(plan.repeats, STEP_ROOM - steps.WARM_UP)
    return [
        Step(batch, heat, steps.measure(llm, model, pool, batch, plan.context, heat, repeats))
        for batch in STEP_BATCHES
        for heat in TEMPERATURES
    ]


def as_json(report: Report) -> dict[str, Any]:
    """Every figure of the tables, in seconds, bytes and operations."""
    passes = {}
    for name, each in report.passes.items():
        rows = {row_name: asdict(row) | {"ratio": row.ratio} for row_name, row in each.rows.items()}
        sums = {"sum_s": each.sum_s, "limit_s": each.limit_s, "ratio": each.whole_s / each.limit_s}
        passes[name] = asdict(each) | sums | {"rows": rows}
    step_rows = [
        asdict(step) | {"whole_s": step.times.whole_s, "outside_share": step.outside_share}
        for step in report.steps
    ]
    machine = {"num_cores": os.cpu_count(), "load_before": report.load_before}
    return {
        "arguments": asdict(report.plan),
        "machine": machine,
        "limits": asdict(report.limits),
        "passes": passes,
        "steps": step_rows,
    }


def show(report: Report) -> None:
    plan, console = report.plan, Console(width=110)
    console.print(_limits_line(report.limits))
    if report.load_before > 0.7:
        console.print(f"figures are noisy: the load was {report.load_before:.1f} at the start")
    titles = {
        "decode": f"a decode step of {plan.batch} at context {plan.context}",
        "prefill": f"a prompt of {plan.prompt} tokens",
    }
    for name, title in titles.items():
        console.print(_pass_table(title, report.passes[name]))
    console.print(_steps_table(report.steps, plan.context))


def _limits_line(found: Limits) -> str:
    by = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in found.flop_per_s_by.items())
    read = f"one core reads {found.read_bytes_per_s / 1e9:.1f} GB/s"
    return f"{read} and multiplies at {found.flop_per_s / 1e9:.1f} GFLOP/s ({by})"


def _pass_table(title: str, each: Pass) -> Table:
    table = _table(title, ("", "ms", "share", "MB", "GFLOP", "limit, ms", "x limit"))
    for name, row in each.rows.items():
        work = (f"{row.num_bytes / 1e6:.1f}", f"{row.flop / 1e9:.3f}") if row.limit_s else ("", "")
        bound = (f"{row.limit_s * 1e3:.3f}", f"{row.ratio:.1f}") if row.limit_s else ("", "")
        table.add_row(name, f"{row.time_s * 1e3:.3f}", f"{row.share:.1%}", *work, *bound)
    table.add_section()
    table.add_row("sum", f"{each.sum_s * 1e3:.3f}", f"{each.sum_s / each.whole_s:.1%} of the whole")
    bound = (f"{each.limit_s * 1e3:.3f}", f"{each.whole_s / each.limit_s:.1f}")
    table.add_row("the whole in one call", f"{each.whole_s * 1e3:.3f}", "", "", "", *bound)
    return table


def _steps_table(measured: Sequence[Step], context: int) -> Table:
    heads = [f"batch {step.batch}, T {step.temperature:g}" for step in measured]
    table = _table(f"an engine's step at context {context}, ms", ("", *heads))
    for field in fields(StepTimes):
        values = [f"{getattr(step.times, field.name) * 1e3:.3f}" for step in measured]
        table.add_row(field.name.removesuffix("_s"), *values)
    table.add_section()
    table.add_row("whole", *(f"{step.times.whole_s * 1e3:.3f}" for step in measured))
    table.add_row("outside the pass", *(f"{step.outside_share:.1%}" for step in measured))
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    return table
