"""What a user would pick on this machine: `python -m bench.compare_vllm`.

The same model, prompts and client on vLLM's CPU build and on a tandem, one after the other. vLLM runs over all cores,
in bfloat16 and in float32 (faster where the processor has no products of bfloat16); a tandem of one prefill and one
decode worker in bfloat16, with dense weights and with the file's own, and once with workers that keep to their own
cores. Ratios are tandem / the faster vLLM."""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.client import Outcome
from bench.load import Load
from bench.traffic import TOKEN_IDS
from bench.vllm_environment import exported, install, vllm_served
from core.errors import Unavailable
from tandem.served import served

DIRECTORY = Path(__file__).resolve().parents[1] / ".bench"
PROMPTS = (256, 1024, 3500)
CONCURRENCIES = (1, 8)
SHORT_PROMPT, NUM_OUTPUT = 32, 64
NAME = "smollm2"
VLLM_DTYPES = ("bfloat16", "float32")
TANDEMS = {
    "tandem dense": ["--weights", "dense"],
    "tandem stored": ["--weights", "stored"],
    "tandem dense, own cores": ["--weights", "dense", "--no-borrow"],
}

Figures = dict[str, float]
Server = contextlib.AbstractAsyncContextManager[dict[str, Any]]


def per_token_s(outcomes: Sequence[Outcome], num_output: int) -> float:
    """From the first to the last token, by the number of tokens between: a chunk may hold several."""
    return statistics.median(sum(outcome.gaps_s) / (num_output - 1) for outcome in outcomes)


async def measure(
    url: str, repeats: int, seed: int, prompts: Sequence[int] = PROMPTS, token_ids: range = TOKEN_IDS
) -> Figures:
    """Seconds. Every server is asked the same; one request of a kind goes ahead and counts for nothing."""
    figures: Figures = {}
    for concurrency in CONCURRENCIES:
        load = Load(url, SHORT_PROMPT, NUM_OUTPUT, random.Random(seed), token_ids)
        _whole(await asyncio.gather(*(load.one() for _ in range(concurrency))))
        asked = [
            outcome
            for _ in range(repeats)
            for outcome in await asyncio.gather(*(load.one() for _ in range(concurrency)))
        ]
        await load.close()
        figures[f"per token, {concurrency} at a time"] = per_token_s(_whole(asked), NUM_OUTPUT)
    for num_prompt in prompts:
        load = Load(url, num_prompt, 1, random.Random(seed + num_prompt), token_ids)
        asked = [await load.one() for _ in range(repeats + 1)][1:]
        await load.close()
        first = statistics.median(outcome.first_token_s for outcome in _whole(asked))
        figures[f"first token of {num_prompt}"] = first
    return figures


def _whole(outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
    """All of them, or RuntimeError: a refused request is no figure."""
    failed = [outcome.status for outcome in outcomes if not outcome.is_whole]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(outcomes)} requests did not end whole: status {failed}")
    return outcomes


async def measure_vllm(args: argparse.Namespace) -> tuple[dict[str, Figures], list[str]]:
    """By column; and why there is none."""
    columns: dict[str, Figures] = {}
    reasons = []
    for dtype in args.vllm_dtypes.split(","):
        try:
            python = install(DIRECTORY / "vllm")
            model = exported(args.model, DIRECTORY)
            columns[f"vLLM {dtype}"] = await measure_one(
                f"vLLM {dtype}", vllm_served(python, model, NAME, dtype), args
            )
        except (Unavailable, RuntimeError) as error:
            reasons.append(f"vLLM {dtype} does not run on this machine: {error}")
    return columns, reasons


async def measure_one(column: str, server: Server, args: argparse.Namespace) -> Figures:
    async with server as addresses:
        figures = await measure(addresses["http"], args.repeats, args.seed)
        rounded = {row: round(value, 4) for row, value in figures.items()}
        sys.stderr.write(f"{column}: {rounded}\n")
        return figures


async def measure_all(args: argparse.Namespace) -> tuple[dict[str, Figures], list[str]]:
    columns, reasons = await measure_vllm(args) if args.vllm_dtypes else ({}, [])
    for column, options in TANDEMS.items():
        command = [args.model, "--model-id", NAME, "--max-queue", "600", *options]
        columns[column] = await measure_one(column, served(command), args)
    return columns, reasons


def ratios(columns: dict[str, Figures]) -> dict[str, Figures]:
    """Of each tandem to the fastest vLLM of that row; empty without a vLLM."""
    others = [figures for column, figures in columns.items() if column.startswith("vLLM")]
    if not others:
        return {}
    best = {row: min(figures[row] for figures in others) for row in others[0]}
    own = {column: figures for column, figures in columns.items() if column in TANDEMS}
    return {column: {row: figures[row] / best[row] for row in best} for column, figures in own.items()}


def show(columns: dict[str, Figures], reasons: Sequence[str], load: float, console: Console) -> None:
    if load > 0.7:
        console.print(f"figures are noisy: the load was {load:.1f} at the start")
    for reason in reasons:
        console.print(reason, markup=False)
    compared = ratios(columns)
    table = Table(title="milliseconds")
    for column in ("", *columns, *(f"{column} / vLLM" for column in compared)):
        table.add_column(column, justify="right" if column else "left")
    for row in next(iter(columns.values())):
        values = [f"{figures[row] * 1e3:.1f}" for figures in columns.values()]
        table.add_row(row, *values, *(f"{figures[row]:.2f}" for figures in compared.values()))
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeats", type=int, default=3, help="of each request; figures are medians")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vllm-dtypes", default=",".join(VLLM_DTYPES), help="empty: tandem alone")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    columns, reasons = asyncio.run(measure_all(args))
    show(columns, reasons, load, Console(width=120))
    if args.json is not None:
        told = {"load_before": load, "figures_s": columns, "ratios": ratios(columns), "vllm": reasons}
        args.json.write_text(json.dumps({"arguments": vars(args), **told}, indent=1, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
