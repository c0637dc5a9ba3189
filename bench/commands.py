"""`tandem bench …`: options, and a line or two over the module that does the work, imported only when it runs."""

import os
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from bench.command_options import (
    EXISTING,
    FILE,
    asked_of,
    chunks_of,
    engine_of,
    length_options,
    model_options,
    output_options,
    plan_options,
    slo_of,
    slo_options,
    systems_of,
    systems_options,
    traffic_options,
    words_of,
)
from core.errors import ModelLoadError, TandemError
from core.kv_spec import DType

CONFIGURATION_MISTAKE = 2


@click.group()
def bench() -> None:
    """Measure on this machine; figures compare within one run."""


def _run(work: Coroutine[Any, Any, object]) -> None:
    from tandem import served

    _attempt(partial(served.run, work))


def _attempt(work: Callable[[], object]) -> None:
    """An error is one line: status 2 for a mistake in what was asked, else 1."""
    try:
        work()
    except (ModelLoadError, ValueError) as error:
        _end(error, CONFIGURATION_MISTAKE)
    except (TandemError, OSError) as error:
        _end(error, 1)


def _end(error: Exception, status: int) -> None:
    click.echo(f"tandem: {error}", err=True)
    sys.exit(status)


@bench.command()
@model_options
@click.option("--batch", default=1, show_default=True, help="Sequences of the decode step.")
@click.option("--context", default=512, show_default=True, help="Tokens of each of them.")
@click.option("--prompt", default=256, show_default=True, help="Tokens of the prompt.")
@click.option("--json", "json_path", default=None, type=FILE)
def kernels(dtype: str, weights: str, json_path: Path | None, **options: Any) -> None:
    """Where a step's milliseconds go, and how far from this machine's limits each operation is."""
    from bench.kernels import Plan
    from bench.kernels import run as measure
    from engine.config import WeightForm

    _attempt(lambda: measure(Plan(dtype=DType(dtype), weights=WeightForm(weights), **options), json_path))


@bench.command()
@click.option(
    "--url", default="http://127.0.0.1:8000", show_default=True, help="Any OpenAI-compatible server."
)
@click.option("--model", default="", help="What it calls the model [its first one].")
@click.option(
    "--endpoint", type=click.Choice(("completions", "chat")), default="completions", show_default=True
)
@click.option("--api-key", default="none", envvar="OPENAI_API_KEY")
@click.option(
    "--stops-early", is_flag=True, help="Do not send ignore_eos, which OpenAI's own servers do not know."
)
@traffic_options
@click.option(
    "--concurrency", default=None, type=int, help="A closed loop: so many at a time, whatever the rates."
)
@slo_options
@output_options
def serve(url: str, model: str, endpoint: str, api_key: str, stops_early: bool, **options: Any) -> None:
    """Latencies, SLO attainment and goodput of a running server under synthetic traffic or a trace."""
    from bench import serve as measuring
    from bench.client import Endpoint

    target = measuring.Target(url, model, Endpoint(endpoint), api_key, not stops_early)
    asked, slo = asked_of(options), slo_of(options)
    paths = options["json_path"], options["html_path"]
    _run(measuring.run(target, asked, slo, options["attainment"], *paths))


@bench.command()
@systems_options
@traffic_options
@slo_options
@output_options
def compare(**options: Any) -> None:
    """Does disaggregation pay here? One process, a tandem, and perhaps others under the same traffic."""
    from bench import compare as comparing

    paths = options["json_path"], options["html_path"]
    _run(
        comparing.run(systems_of(options), asked_of(options), slo_of(options), options["attainment"], *paths)
    )


@bench.command()
@systems_options
@click.option("--streams", "num_streams", default=4, show_default=True)
@click.option("--output", "stream_output", default=1000, show_default=True, help="Tokens of a stream.")
@click.option("--prompts", "num_prompts", default=6, show_default=True)
@click.option("--prompt", "prompt_tokens", default=1500, show_default=True, help="Tokens of a long prompt.")
@click.option("--apart", "apart_s", default=4.0, show_default=True, help="Seconds between them.")
@click.option("--seed", default=1, show_default=True)
@output_options
def interference(json_path: Path | None, html_path: Path | None, **options: Any) -> None:
    """What long prompts do to the gaps of streams beside them, in one process, a tandem, and perhaps others."""
    from bench import interference as measuring

    names = ("num_streams", "stream_output", "num_prompts", "prompt_tokens", "apart_s", "seed")
    scene = measuring.Scene(**{name: options[name] for name in names})
    _run(measuring.run(systems_of(options), scene, json_path, html_path))


@bench.command()
@click.option("--model", default="smollm2", show_default=True)
@click.option("--prefill", "num_prefill", default=2, show_default=True, help="Prefill workers.")
@click.option("--decode", "num_decode", default=2, show_default=True, help="Decode workers.")
@click.option(
    "--memory",
    default=None,
    type=float,
    help="The prefill tier's, in parts of the trace's blocks [as it is].",
)
@click.option("--serve-options", default="", callback=words_of, help="More options of `tandem serve`.")
@traffic_options
@click.option("--json", "json_path", default=None, type=FILE)
def prefix(json_path: Path | None, **options: Any) -> None:
    """What routing by cached prefixes is worth, against each worker in turn and against what a cache could have."""
    from bench import prefix as measuring

    names = ("model", "num_prefill", "num_decode", "memory")
    cluster = measuring.Cluster(**{name: options[name] for name in names}, options=options["serve_options"])
    _run(measuring.run(cluster, asked_of(options), json_path))


@bench.command()
@click.option("--model", default="smollm2", show_default=True)
@click.option("--prefill", "num_prefill", default=2, show_default=True, help="Prefill workers.")
@click.option("--decode", "num_decode", default=2, show_default=True, help="Decode workers.")
@click.option("--prefix", "prefix_tokens", default=1024, show_default=True, help="Tokens that are shared.")
@click.option("--requests", "num_requests", default=16, show_default=True, help="Who share them.")
@click.option(
    "--long", "long_tokens", default=3000, show_default=True, help="Tokens that keep a worker busy."
)
@click.option("--rounds", default=5, show_default=True)
@click.option("--vocab-size", default=40000, show_default=True, help="Prompts are of ids below that.")
@click.option("--serve-options", default="", callback=words_of, help="More options of `tandem serve`.")
@click.option("--json", "json_path", default=None, type=FILE)
def reuse(json_path: Path | None, serve_options: tuple[str, ...], **options: Any) -> None:
    """What a prefix that is used again saves, wherever it is wanted, and what the cache costs those who use none."""
    from bench import reuse as measuring

    _run(measuring.run(measuring.Plan(**options, options=serve_options), json_path))


@bench.command("profile")
@click.argument("path", type=FILE)
@model_options
def write_profile(path: Path, model: str, dtype: str, weights: str) -> None:
    """What this machine takes for what an engine does: into PATH, for `simulate` and `tune`."""
    from bench import profile
    from engine.config import EngineConfig, WeightForm

    config = EngineConfig(model, DType(dtype), weights=WeightForm(weights))
    _run(profile.run(profile.Asked(config), path))


@click.command()
@click.argument("profile", type=EXISTING)
@plan_options
@traffic_options
@slo_options
@output_options
def simulate(profile: Path, **options: Any) -> None:
    """A cluster of any size under traffic, in simulated time, from a PROFILE of this machine."""
    from bench import simulate as simulation
    from bench.profile import read
    from bench.simulation.cluster import Plan

    try:
        known = read(profile)
        names = ["num_prefill", "num_decode", "num_colocated", "num_blocks", "block_size", "max_batch"]
        names += ["token_budget", "max_queue_s", "max_local_tokens", "pace_s", "is_one_host"]
        plan = Plan(
            **{name: options[name] for name in names},
            num_threads=options["num_threads"] or min(known.engines),
            borrows=not options["no_borrow"],
            has_prefix_cache=not options["no_prefix_cache"],
        )
        traffics = asked_of(options).traffics()
        paths = options["json_path"], options["html_path"]
        simulation.run(plan, known, traffics, slo_of(options), options["attainment"], *paths)
    except (ValueError, KeyError) as error:
        _end(error, CONFIGURATION_MISTAKE)


@click.command()
@click.argument("path", type=FILE)
@click.option("--model", default="smollm2", show_default=True)
@click.option(
    "--profile",
    "profile_path",
    default=None,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Made by `tandem bench profile` [measured now].",
)
@click.option(
    "--confirm", "num_confirmed", default=3, show_default=True, help="How many are served and measured."
)
@click.option(
    "--serve-options", default="", callback=words_of, help="For all that are served: '--weights dense'."
)
@click.option(
    "--grid", "has_grid", is_flag=True, help="Measure a small grid as well: did the search miss any?"
)
@traffic_options
@slo_options
@click.option("--json", "json_path", default=None, type=FILE, help="Everything simulated and measured.")
def tune(path: Path, model: str, profile_path: Path | None, **options: Any) -> None:
    """Find the options of `serve` with the best goodput for a traffic, and write them into PATH."""
    from bench import profile
    from bench import tune as tuning
    from engine.config import EngineConfig

    async def work() -> None:
        known = (
            profile.read(profile_path)
            if profile_path
            else await profile.profile(profile.Asked(EngineConfig(model)))
        )
        asked = asked_of({**options, "rates": (1.0,)})
        wish = tuning.Wish(
            lambda rate: replace(asked, rates=(rate,)).traffics()[0], slo_of(options), options["attainment"]
        )
        await tuning.run(
            model,
            known,
            wish,
            asked,
            len(os.sched_getaffinity(0)),
            options["num_confirmed"],
            options["serve_options"],
            path,
            options["json_path"],
            options["has_grid"],
        )

    if not any(options[name] for name in ("slo_ttft", "slo_itl", "slo_gap", "slo_e2e")):
        raise click.UsageError("tune needs to know what is wanted: --slo-ttft and --slo-itl, or others")
    if options["has_grid"] and not options["num_confirmed"]:
        raise click.UsageError("--grid compares what is measured: --confirm must be at least 1")
    _run(work())


@bench.command()
@model_options
@click.option("--threads", default=1, show_default=True, help="Cores that a step may use.")
@click.option("--batch", default=1, show_default=True, help="Prompts at once.")
@click.option("--prompt", default=256, show_default=True, help="Tokens of each of them.")
@click.option("--output", default=64, show_default=True, help="Tokens that are generated for each.")
@click.option("--repeats", default=10, show_default=True, help="After one that does not count.")
@output_options
def latency(json_path: Path | None, html_path: Path | None, **options: Any) -> None:
    """How long one batch takes in one process: its first token, each after it, the whole."""
    from bench import latency as measuring

    shape = {name: options[name] for name in ("batch", "prompt", "output", "repeats")}
    _attempt(lambda: measuring.run(measuring.Plan(engine_of(options), **shape), json_path, html_path))


@bench.command()
@model_options
@click.option("--threads", default=1, show_default=True, help="Cores that a step may use.")
@length_options
@output_options
def throughput(json_path: Path | None, html_path: Path | None, **options: Any) -> None:
    """Tokens and requests a second of one process that has all of its work at once."""
    from bench import throughput as measuring
    from bench.serve import Asked
    from bench.traffic import Lengths

    names = ("num_requests", "trace", "divisor", "seed")
    lengths = Lengths(options["prompt"], options["output"], options["spread"])
    asked = Asked(lengths=lengths, **{name: options[name] for name in names})
    _attempt(lambda: measuring.run(measuring.Plan(engine_of(options), asked), json_path, html_path))


@bench.command()
@click.option("--sizes", default="", help="Bytes, as 4k,64k,1m [4 KiB to 256 MiB by factors of 4].")
@click.option("--connectors", default="", help="As shm,tcp [all that this machine has].")
@output_options
def transfer(sizes: str, connectors: str, json_path: Path | None, html_path: Path | None) -> None:
    """KV blocks between two processes on every connector, beside a memory copy and the bare transport."""
    from bench import transfer as measuring

    _attempt(lambda: measuring.run(measuring.Plan.read(sizes, connectors), json_path, html_path))


@bench.command()
@click.argument("profile", type=EXISTING)
@click.option("--model", default="smollm2", show_default=True)
@click.option(
    "--chunks", default="128", show_default=True, callback=chunks_of, help="Of one-process engines."
)
@click.option("--pace", "pace_s", default=0.0, show_default=True, help="Of the tandem.")
@click.option("--no-borrow", is_flag=True, help="Its workers leave each other's idle cores alone.")
@click.option("--serve-options", default="", callback=words_of, help="For all of ours: '--weights dense'.")
@traffic_options
@slo_options
@click.option("--json", "json_path", default=None, type=FILE, help="Everything measured.")
def accuracy(profile: Path, model: str, **options: Any) -> None:
    """How well the simulator, from a PROFILE of this machine, predicts what is measured here."""
    from bench import accuracy as checking
    from bench.profile import read

    async def work() -> None:
        known = read(profile)
        plans = checking.plans_of(known, options["chunks"], options["pace_s"], not options["no_borrow"])
        told = options["serve_options"]
        await checking.run(
            known, plans, model, told, asked_of(options), slo_of(options), options["json_path"]
        )

    _run(work())
