"""What borrowed cores cost those who lend them: `python -m bench.borrowed`.

A few steady streams decode while long prompts prefill one after the other; once with workers that borrow each other's
idle cores and once without. Prints the gaps between tokens with and without prompts, and the times to first token."""

import argparse
import asyncio
import json
import random
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.client import Outcome
from bench.load import Load
from bench.summary import quantile
from core.errors import EngineFailed
from tandem.served import served

STEADY_PROMPT = 32
LONG_OUTPUT = 2  # so that the prompt's blocks travel too
MODES = {"borrowed": [], "own cores alone": ["--no-borrow"]}

Figures = dict[str, float]


def gaps_s(outcomes: list[Outcome]) -> list[float]:
    """Raises EngineFailed when a stream did not end as it should: nothing is measured then."""
    broken = [outcome.status for outcome in outcomes if not outcome.is_whole]
    if broken:
        raise EngineFailed(f"{len(broken)} of {len(outcomes)} streams were not whole: status {broken}")
    return [gap for outcome in outcomes for gap in outcome.gaps_s]


async def prompts_until(done: asyncio.Event, load: Load) -> list[Outcome]:
    """Those that got their first token before `done`."""
    outcomes = []
    while not done.is_set():
        outcome = await load.one()
        if not done.is_set():
            outcomes.append(outcome)
    return outcomes


async def measure(url: str, args: argparse.Namespace) -> Figures:
    steady = Load(url, STEADY_PROMPT, args.output, random.Random(args.seed))
    long = Load(url, args.prompt, LONG_OUTPUT, random.Random(args.seed + 1))
    await asyncio.gather(long.one(), *(steady.one() for _ in range(args.streams)))
    alone = gaps_s(await asyncio.gather(*(steady.one() for _ in range(args.streams))))
    idle = await long.one()
    done = asyncio.Event()
    prompts = asyncio.create_task(prompts_until(done, long))
    beside = gaps_s(await asyncio.gather(*(steady.one() for _ in range(args.streams))))
    done.set()
    with_streams = [outcome.first_token_s for outcome in await prompts]
    await asyncio.gather(steady.close(), long.close())
    return {
        "gap p50, streams alone": quantile(alone, 0.5),
        "gap p50, prompts beside": quantile(beside, 0.5),
        "gap p99, streams alone": quantile(alone, 0.99),
        "gap p99, prompts beside": quantile(beside, 0.99),
        "first token, decode idle": idle.first_token_s,
        "first token, streams beside": quantile(with_streams, 0.5),
    }


async def measure_all(args: argparse.Namespace) -> dict[str, Figures]:
    results = {}
    for mode, options in MODES.items():
        async with served(
            [args.model, "--max-queue", "600", "--weights", args.weights, *options]
        ) as addresses:
            results[mode] = await measure(addresses["http"], args)
            sys.stderr.write(f"{mode}: { {row: round(value, 4) for row, value in results[mode].items()} }\n")
    return results


def show(results: dict[str, Figures], console: Console) -> None:
    borrowed, own = (results[mode] for mode in MODES)
    table = Table(title="milliseconds")
    for column in ("", *MODES, "borrowed / own"):
        table.add_column(column, justify="right" if column else "left")
    for row in borrowed:
        values = (f"{figures[row] * 1e3:.1f}" for figures in results.values())
        table.add_row(row, *values, f"{borrowed[row] / own[row]:.2f}")
    console.print(table)
    for mode, figures in results.items():
        ratio = figures["gap p99, prompts beside"] / figures["gap p99, streams alone"]
        console.print(f"{mode}: gap p99 with prompts beside is {ratio:.2f} of that without")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weights", default="dense", choices=("stored", "dense"))
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--output", type=int, default=600, help="tokens of a stream")
    parser.add_argument("--prompt", type=int, default=3500, help="tokens of a long prompt")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    results = asyncio.run(measure_all(args))
    show(results, Console(width=120))
    if args.json is not None:
        args.json.write_text(
            json.dumps({"arguments": vars(args), "figures_s": results}, indent=1, default=str)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
