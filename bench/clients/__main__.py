"""Other people's clients, unchanged, against a tandem: `python -m bench.clients`.

langchain-openai and litellm do what their users do, and lm-eval runs tasks over /v1/completions, whose numbers must
be those of transformers over the same weights in float32. Each client is installed at its first use, into an
environment of its own below .bench/ (several GB with torch; `PIP_EXTRA_INDEX_URL` set to the index of PyTorch's CPU
wheels downloads much less). Without --url a tandem is started for it."""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.clients.cases import Outcome, read
from bench.clients.lm_eval_tasks import compare
from bench.virtual_environment import Environment, install
from bench.vllm_environment import exported
from core.errors import Unavailable
from tandem.served import served

ROOT = Path(__file__).resolve().parents[2]
DIRECTORY = ROOT / ".bench"
CASES_LIMIT_S = 300.0
ENVIRONMENTS = {
    "langchain": Environment(("langchain-openai==1.7.4",)),
    "litellm": Environment(("litellm==1.109.3",)),
    "lm_eval": Environment(
        ("lm-eval[api,hf]==0.4.13", "torch==2.13.0"), from_source=("rouge-score", "sqlitedict", "word2number")
    ),
}

Try = Callable[[Path, str, argparse.Namespace], list[Outcome]]


def try_cases(name: str) -> Try:
    """Those of a module that runs in the client's environment."""

    def run(python: Path, url: str, args: argparse.Namespace) -> list[Outcome]:
        module = f"bench.clients.{name}_cases"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        done = subprocess.run(
            [str(python), "-m", module, url, args.model_id],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=CASES_LIMIT_S,
        )
        if done.returncode:
            raise Unavailable(f"{module} exited with {done.returncode}: {done.stderr[-1500:]}")
        return read(done.stdout)

    return run


def try_lm_eval(python: Path, url: str, args: argparse.Namespace) -> list[Outcome]:
    return compare(python, url, args.model_id, exported(args.model, DIRECTORY, torch.float32))


TRIES: dict[str, Try] = {
    "langchain": try_cases("langchain"),
    "litellm": try_cases("litellm"),
    "lm_eval": try_lm_eval,
}


def try_client(name: str, url: str, args: argparse.Namespace) -> list[Outcome]:
    """Its outcomes; one that is wrong when it cannot be tried."""
    try:
        outcomes = TRIES[name](install(DIRECTORY / name, ENVIRONMENTS[name]), url, args)
    except (Unavailable, subprocess.TimeoutExpired) as error:
        return [Outcome("can be tried", False, str(error))]
    return outcomes or [Outcome("can be tried", False, "it told of no case")]


@contextlib.asynccontextmanager
async def addressed(args: argparse.Namespace) -> AsyncIterator[dict[str, Any]]:
    if args.url:
        yield {"http": args.url}
        return
    options = ["--model-id", args.model_id, "--dtype", "float32", "--num-blocks", "1024"]
    async with served([args.model, *options]) as addresses:
        yield addresses


async def try_all(args: argparse.Namespace) -> dict[str, list[Outcome]]:
    async with addressed(args) as addresses:
        url = addresses["http"]
        return {
            name: await asyncio.to_thread(try_client, name, url, args) for name in args.clients.split(",")
        }


def show(outcomes: dict[str, list[Outcome]], console: Console) -> None:
    table = Table()
    for column in ("client", "case", "", "what it saw"):
        table.add_column(column)
    for client, own in outcomes.items():
        version = ENVIRONMENTS[client].requirements[0]
        for outcome in own:
            table.add_row(version, outcome.case, "right" if outcome.is_right else "WRONG", outcome.told)
    console.print(table, markup=False)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="directory, GGUF file or smollm2")
    parser.add_argument("--model-id", default="smollm2", help="what clients write in `model`")
    parser.add_argument("--url", default="", help="of a running system that serves --model in float32")
    parser.add_argument("--clients", default=",".join(TRIES), help="of %(default)s")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    outcomes = asyncio.run(try_all(args))
    show(outcomes, Console(width=160))
    if args.json is not None:
        told = {client: [asdict(outcome) for outcome in own] for client, own in outcomes.items()}
        args.json.write_text(json.dumps(told, indent=1))
    return 0 if all(outcome.is_right for own in outcomes.values() for outcome in own) else 1


if __name__ == "__main__":
    sys.exit(main())
