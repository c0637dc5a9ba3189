"""What overload does to those who are served: `python -m bench.overload`.

One tandem on this machine. First its capacity: what it serves of an open loop (Poisson) that asks for more than a
closed loop got. Then open loops at parts and multiples of that. Prints latencies of the accepted, how fast the others
were refused, and goodput: requests a second that ended whole within --slo-ttft and --slo-itl (mean gap)."""

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.client import Outcome
from bench.load import Load, poisson
from bench.summary import quantile
from tandem.served import served

BASE, OVER = 0.9, 2.0
FLOOD = 1.7  # of what a closed loop got: more than can be served, or the capacity is measured too small


def served_per_s(outcomes: Sequence[Outcome], duration_s: float) -> float:
    return sum(outcome.is_whole for outcome in outcomes) / duration_s


def summarize(outcomes: Sequence[Outcome], duration_s: float, args: argparse.Namespace) -> dict[str, float]:
    whole = [outcome for outcome in outcomes if outcome.is_whole]
    refused = [outcome.took_s for outcome in outcomes if outcome.is_refused]
    good = [o for o in whole if o.first_token_s <= args.slo_ttft and o.mean_gap_s <= args.slo_itl]
    gaps = [gap for outcome in whole for gap in outcome.gaps_s]
    return {
        "asked": len(outcomes),
        "whole": len(whole),
        "refused": len(refused),
        "lost": len(outcomes) - len(whole) - len(refused),
        "goodput_per_s": len(good) / duration_s,
        "ttft_p50_s": quantile([o.first_token_s for o in whole], 0.5),
        "ttft_p90_s": quantile([o.first_token_s for o in whole], 0.9),
        "ttft_p99_s": quantile([o.first_token_s for o in whole], 0.99),
        "itl_p50_s": quantile(gaps, 0.5),
        "itl_p99_s": quantile(gaps, 0.99),
        "refusal_p50_s": quantile(refused, 0.5),
        "refusal_p99_s": quantile(refused, 0.99),
        "refusal_max_s": max(refused, default=0.0),
    }


async def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    rng = random.Random(args.seed)
    options = ["--max-batch", str(args.max_batch), "--max-queue", str(args.max_queue)]
    async with served([args.model, "--prefill", "1", "--decode", "1", *options]) as addresses:
        load = Load(addresses["http"], args.prompt, args.output, rng)
        await load.closed(2, 3.0)
        guess = served_per_s(await load.closed(args.max_batch, args.seconds / 4), args.seconds / 4)
        flood = poisson(FLOOD * guess, args.seconds / 2, rng)
        capacity = served_per_s(await load.at(list(flood)), args.seconds / 2)
        results = {"capacity": {"requests_per_s": capacity}}
        for part in args.loads:
            sys.stderr.write(f"{part:g} of {capacity:.2f} requests a second for {args.seconds:g} s\n")
            outcomes = await load.at(list(poisson(part * capacity, args.seconds, rng)))
            results[f"{part:g}"] = summarize(outcomes, args.seconds, args)
            await asyncio.sleep(3)
        await load.close()
    return results


def show(results: dict[str, dict[str, float]], loads: Sequence[float]) -> None:
    base, over = results[f"{BASE:g}"], results[f"{OVER:g}"]
    peak = max(results[f"{part:g}"]["goodput_per_s"] for part in loads)
    table = Table(title=f"capacity {results['capacity']['requests_per_s']:.2f} requests a second")
    for column in ("", *(f"load {part:g}" for part in loads), "load 2 / load 0.9"):
        table.add_column(column, justify="right")
    for name in base:
        row = [f"{results[f'{part:g}'][name]:.3g}" for part in loads]
        ratio = f"{over[name] / base[name]:.2f}" if base[name] and name.endswith("_s") else ""
        table.add_row(name, *row, ratio)
    console = Console(width=120)
    console.print(table)
    console.print(f"goodput at twice the load: {over['goodput_per_s'] / peak:.2f} of its peak")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    parser.add_argument(
        "--loads", type=float, nargs="+", default=[0.7, BASE, 1.0, OVER], help=f"{BASE} and {OVER} among them"
    )
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--max-queue", type=float, default=0.3, help="the gateway's, seconds")
    parser.add_argument("--slo-ttft", type=float, default=3.0)
    parser.add_argument("--slo-itl", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    results = asyncio.run(measure(args))
    show(results, args.loads)
    if args.json is not None:
        args.json.write_text(json.dumps({"arguments": vars(args), **results}, indent=1, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
