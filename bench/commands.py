"""`tandem bench …`: options, and a line or two over the module that does the work, imported only when it runs."""

import asyncio
import shlex
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import click

from core.errors import ModelLoadError, TandemError
from core.kv_spec import DType

CONFIGURATION_MISTAKE = 2
DTYPES = [dtype.value for dtype in DType]
FILE = click.Path(dir_okay=False, path_type=Path)
EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group()
def bench() -> None:
    """Measure on this machine; figures compare within one run."""


def _run(work: Coroutine[Any, Any, object]) -> None:
    _attempt(partial(asyncio.run, work))


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


def _model_options(command: Callable[..., None]) -> Callable[..., None]:
    weights, dtypes = click.Choice(("stored", "dense")), click.Choice(DTYPES)
    command = click.option("--weights", type=weights, default="stored", show_default=True)(command)
    command = click.option("--dtype", type=dtypes, default="bfloat16", show_default=True)(command)
    return click.option("--model", default="smollm2", show_default=True)(command)


@bench.command()
@_model_options
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


def _rates(context: click.Context, parameter: click.Parameter, value: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(rate) for rate in value.split(",") if rate)
    except ValueError:
        raise click.BadParameter(f"requests a second, with commas between, as 1,2.5: got {value!r}") from None
    if any(rate <= 0 for rate in rates):
        raise click.BadParameter(f"rates are positive: got {value!r}")
    return rates


def _length_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(
        (
            click.option(
                "--requests", "num_requests", default=None, type=int, help="How many [100; all of a trace]."
            ),
            click.option(
                "--trace",
                default=None,
                type=EXISTING,
                help="Azure's CSV or Mooncake's JSON lines instead of synthetic traffic.",
            ),
            click.option(
                "--divide", "divisor", default=1, show_default=True, help="A trace's lengths by this."
            ),
            click.option("--prompt", default=256, show_default=True, help="Tokens of a synthetic prompt."),
            click.option("--output", default=64, show_default=True, help="Tokens of a synthetic answer."),
            click.option(
                "--spread", default=0.0, show_default=True, help="Lengths vary by this part around those."
            ),
            click.option("--seed", default=1, show_default=True),
        )
    ):
        command = option(command)
    return command


def _traffic_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(
        (
            click.option(
                "--rates",
                default="",
                callback=_rates,
                help="Requests a second, a run each, as 1,2,4 [all at once, or as the trace].",
            ),
            click.option(
                "--burstiness",
                default=1.0,
                show_default=True,
                help="Shape of the gamma-distributed gaps: 1 is Poisson, less comes in bursts.",
            ),
            click.option(
                "--vocab-size", default=40000, show_default=True, help="Prompts are token ids below this."
            ),
        )
    ):
        command = option(command)
    return _length_options(command)


def _slo_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(
        (
            click.option("--slo-ttft", default=None, type=float, help="Seconds to the first token."),
            click.option(
                "--slo-itl", default=None, type=float, help="Seconds between its tokens, on average."
            ),
            click.option("--slo-gap", default=None, type=float, help="Seconds of a request's longest gap."),
            click.option("--slo-e2e", default=None, type=float, help="Seconds of a whole request."),
            click.option(
                "--attainment", default=0.9, show_default=True, help="Part that must meet them: goodput."
            ),
        )
    ):
        command = option(command)
    return command


def _output_options(command: Callable[..., None]) -> Callable[..., None]:
    json_option = click.option("--json", "json_path", default=None, type=FILE, help="Everything measured.")
    html_option = click.option("--html", "html_path", default=None, type=FILE, help="A report with plots.")
    return html_option(json_option(command))


def _asked(options: dict[str, Any]) -> Any:
    from bench.serve import Asked
    from bench.traffic import Lengths

    lengths = Lengths(options["prompt"], options["output"], options["spread"])
    names = ("num_requests", "trace", "divisor", "rates", "burstiness", "seed", "vocab_size")
    return Asked(
        lengths=lengths, concurrency=options.get("concurrency"), **{name: options[name] for name in names}
    )


def _slo(options: dict[str, Any]) -> Any:
    from bench.summary import Slo

    return Slo(*(options[name] for name in ("slo_ttft", "slo_itl", "slo_gap", "slo_e2e")))


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
@_traffic_options
@click.option(
    "--concurrency", default=None, type=int, help="A closed loop: so many at a time, whatever the rates."
)
@_slo_options
@_output_options
def serve(url: str, model: str, endpoint: str, api_key: str, stops_early: bool, **options: Any) -> None:
    """Latencies, SLO attainment and goodput of a running server under synthetic traffic or a trace."""
    from bench import serve as measuring
    from bench.client import Endpoint

    target = measuring.Target(url, model, Endpoint(endpoint), api_key, not stops_early)
    asked, slo = _asked(options), _slo(options)
    paths = options["json_path"], options["html_path"]
    _run(measuring.run(target, asked, slo, options["attainment"], *paths))


def _words(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(shlex.split(value))


def _chunks(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    words = [word.strip() for word in value.split(",") if word]
    if not all(map(str.isdecimal, words)):
        raise click.BadParameter(f"tokens of a step, with commas between, as 64,256: got {value!r}")
    return tuple(map(int, words))


def _systems_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(
        (
            click.option("--model", default="smollm2", show_default=True),
            click.option(
                "--colocated", "num_colocated", default=1, show_default=True, help="Engines without tiers."
            ),
            click.option(
                "--chunks", default="64,256", show_default=True, callback=_chunks, help="Their steps, tokens."
            ),
            click.option(
                "--serve-options", default="", callback=_words, help="For all of ours: '--weights dense'."
            ),
            click.option(
                "--tandem-options", default="", callback=_words, help="For the tandem: '--pace 0.05'."
            ),
            click.option(
                "--vllm-chunks", default="", callback=_chunks, help="vLLM (CPU) as well; 0: its default."
            ),
            click.option("--vllm-dtype", default="bfloat16", show_default=True),
            click.option("--url", default=None, help="Another OpenAI-compatible server, which runs already."),
        )
    ):
        command = option(command)
    return command


def _systems(options: dict[str, Any]) -> list[Any]:
    """Those that are compared, the tandem last of ours."""
    from bench import systems

    model, own = options["model"], options["serve_options"]
    chosen = [systems.colocated(model, chunk, options["num_colocated"], own) for chunk in options["chunks"]]
    chosen.append(systems.tandem(model, [*own, *options["tandem_options"]]))
    chosen += [systems.vllm(model, chunk or None, options["vllm_dtype"]) for chunk in options["vllm_chunks"]]
    return [*chosen, systems.at(options["url"])] if options["url"] else chosen


@bench.command()
@_systems_options
@_traffic_options
@_slo_options
@_output_options
def compare(**options: Any) -> None:
    """Does disaggregation pay here? One process, a tandem, and perhaps others under the same traffic."""
    from bench import compare as comparing

    paths = options["json_path"], options["html_path"]
    _run(comparing.run(_systems(options), _asked(options), _slo(options), options["attainment"], *paths))


@bench.command()
@_systems_options
@click.option("--streams", "num_streams", default=4, show_default=True)
@click.option("--output", "stream_output", default=1000, show_default=True, help="Tokens of a stream.")
@click.option("--prompts", "num_prompts", default=6, show_default=True)
@click.option("--prompt", "prompt_tokens", default=1500, show_default=True, help="Tokens of a long prompt.")
@click.option("--apart", "apart_s", default=4.0, show_default=True, help="Seconds between them.")
@click.option("--seed", default=1, show_default=True)
@_output_options
def interference(json_path: Path | None, html_path: Path | None, **options: Any) -> None:
    """What long prompts do to the gaps of streams beside them, in one process, a tandem, and perhaps others."""
    from bench import interference as measuring

    names = ("num_streams", "stream_output", "num_prompts", "prompt_tokens", "apart_s", "seed")
    scene = measuring.Scene(**{name: options[name] for name in names})
    _run(measuring.run(_systems(options), scene, json_path, html_path))


@bench.command("profile")
@click.argument("path", type=FILE)
@_model_options
def write_profile(path: Path, model: str, dtype: str, weights: str) -> None:
    """What this machine takes for what an engine does: into PATH, for `simulate` and `tune`."""
    from bench import profile
    from engine.config import EngineConfig, WeightForm

    config = EngineConfig(model, DType(dtype), weights=WeightForm(weights))
    _run(profile.run(profile.Asked(config), path))


def _plan_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(
        (
            click.option("--prefill", "num_prefill", default=1, show_default=True, help="Prefill workers."),
            click.option("--decode", "num_decode", default=1, show_default=True, help="Decode workers."),
            click.option(
                "--colocated", "num_colocated", default=0, help="Engines that do both, instead of the tiers."
            ),
            click.option(
                "--threads", "num_threads", default=None, type=int, help="Of each [the profile's first]."
            ),
            click.option("--num-blocks", default=2048, show_default=True, help="Blocks of a KV pool."),
            click.option("--block-size", default=16, show_default=True),
            click.option("--max-batch", default=64, show_default=True, help="Sequences of one step."),
            click.option("--token-budget", default=512, show_default=True, help="Tokens of one step."),
            click.option("--max-queue", "max_queue_s", default=10.0, show_default=True, help="Seconds."),
            click.option("--max-local-tokens", default=0, show_default=True, help="As `serve` has it."),
            click.option("--pace", "pace_s", default=0.0, show_default=True, help="As `serve` has it."),
            click.option("--one-host", "is_one_host", is_flag=True, help="All workers share this machine."),
            click.option("--no-borrow", is_flag=True, help="They leave each other's idle cores alone."),
            click.option("--no-prefix-cache", is_flag=True, help="No prompt finds anything of another."),
        )
    ):
        command = option(command)
    return command


@bench.command("simulate")
@click.argument("profile", type=EXISTING)
@_plan_options
@_traffic_options
@_slo_options
@_output_options
def simulate_cluster(profile: Path, **options: Any) -> None:
    """A cluster of any size under traffic, in simulated time, from a PROFILE of this machine."""
    from bench import simulate
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
        traffics = _asked(options).traffics()
        paths = options["json_path"], options["html_path"]
        simulate.run(plan, known, traffics, _slo(options), options["attainment"], *paths)
    except (ValueError, KeyError) as error:
        _end(error, CONFIGURATION_MISTAKE)


def _engine(options: dict[str, Any]) -> Any:
    from bench.offline import Engine
    from engine.config import WeightForm

    dtype, weights = DType(options["dtype"]), WeightForm(options["weights"])
    return Engine(options["model"], dtype, weights, options["threads"])


@bench.command()
@_model_options
@click.option("--threads", default=1, show_default=True, help="Cores that a step may use.")
@click.option("--batch", default=1, show_default=True, help="Prompts at once.")
@click.option("--prompt", default=256, show_default=True, help="Tokens of each of them.")
@click.option("--output", default=64, show_default=True, help="Tokens that are generated for each.")
@click.option("--repeats", default=10, show_default=True, help="After one that does not count.")
@_output_options
def latency(json_path: Path | None, html_path: Path | None, **options: Any) -> None:
    """How long one batch takes in one process: its first token, each after it, the whole."""
    from bench import latency as measuring

    shape = {name: options[name] for name in ("batch", "prompt", "output", "repeats")}
    _attempt(lambda: measuring.run(measuring.Plan(_engine(options), **shape), json_path, html_path))


@bench.command()
@_model_options
@click.option("--threads", default=1, show_default=True, help="Cores that a step may use.")
@_length_options
@_output_options
def throughput(json_path: Path | None, html_path: Path | None, **options: Any) -> None:
    """Tokens and requests a second of one process that has all of its work at once."""
    from bench import throughput as measuring
    from bench.serve import Asked
    from bench.traffic import Lengths

    names = ("num_requests", "trace", "divisor", "seed")
    lengths = Lengths(options["prompt"], options["output"], options["spread"])
    asked = Asked(lengths=lengths, **{name: options[name] for name in names})
    _attempt(lambda: measuring.run(measuring.Plan(_engine(options), asked), json_path, html_path))


@bench.command()
@click.option("--sizes", default="", help="Bytes, as 4k,64k,1m [4 KiB to 256 MiB by factors of 4].")
@click.option("--connectors", default="", help="As shm,tcp [all that this machine has].")
@_output_options
def transfer(sizes: str, connectors: str, json_path: Path | None, html_path: Path | None) -> None:
    """KV blocks between two processes on every connector, beside a memory copy and the bare transport."""
    from bench import transfer as measuring

    _attempt(lambda: measuring.run(measuring.Plan.read(sizes, connectors), json_path, html_path))
