"""Options that several of `tandem bench`'s commands share, and what they make of them."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from core.kv_spec import DType

DTYPES = [dtype.value for dtype in DType]
FILE = click.Path(dir_okay=False, path_type=Path)
EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)


def model_options(command: Callable[..., None]) -> Callable[..., None]:
    weights, dtypes = click.Choice(("stored", "dense")), click.Choice(DTYPES)
    command = click.option("--weights", type=weights, default="stored", show_default=True)(command)
    command = click.option("--dtype", type=dtypes, default="bfloat16", show_default=True)(command)
    return click.option("--model", default="smollm2", show_default=True)(command)


def _rates(context: click.Context, parameter: click.Parameter, value: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(rate) for rate in value.split(",") if rate)
    except ValueError:
        raise click.BadParameter(f"requests a second, with commas between, as 1,2.5: got {value!r}") from None
    if any(rate <= 0 for rate in rates):
        raise click.BadParameter(f"rates are positive: got {value!r}")
    return rates


def length_options(command: Callable[..., None]) -> Callable[..., None]:
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


def traffic_options(command: Callable[..., None]) -> Callable[..., None]:
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
    return length_options(command)


def slo_options(command: Callable[..., None]) -> Callable[..., None]:
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


def output_options(command: Callable[..., None]) -> Callable[..., None]:
    json_option = click.option("--json", "json_path", default=None, type=FILE, help="Everything measured.")
    html_option = click.option("--html", "html_path", default=None, type=FILE, help="A report with plots.")
    return html_option(json_option(command))


def asked_of(options: dict[str, Any]) -> Any:
    from bench.serve import Asked
    from bench.traffic import Lengths

    lengths = Lengths(options["prompt"], options["output"], options["spread"])
    names = ("num_requests", "trace", "divisor", "rates", "burstiness", "seed", "vocab_size")
    return Asked(
        lengths=lengths, concurrency=options.get("concurrency"), **{name: options[name] for name in names}
    )


def slo_of(options: dict[str, Any]) -> Any:
    from bench.summary import Slo

    return Slo(*(options[name] for name in ("slo_ttft", "slo_itl", "slo_gap", "slo_e2e")))


def words_of(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(shlex.split(value))


def chunks_of(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    words = [word.strip() for word in value.split(",") if word]
    if not all(map(str.isdecimal, words)):
        raise click.BadParameter(f"tokens of a step, with commas between, as 64,256: got {value!r}")
    return tuple(map(int, words))


def systems_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(
        (
            click.option("--model", default="smollm2", show_default=True),
            click.option(
                "--colocated", "num_colocated", default=1, show_default=True, help="Engines without tiers."
            ),
            click.option(
                "--chunks",
                default="64,256",
                show_default=True,
                callback=chunks_of,
                help="Their steps, tokens.",
            ),
            click.option(
                "--serve-options", default="", callback=words_of, help="For all of ours: '--weights dense'."
            ),
            click.option(
                "--tandem-options", default="", callback=words_of, help="For the tandem: '--pace 0.05'."
            ),
            click.option(
                "--vllm-chunks", default="", callback=chunks_of, help="vLLM (CPU) as well; 0: its default."
            ),
            click.option("--vllm-dtype", default="bfloat16", show_default=True),
            click.option("--url", default=None, help="Another OpenAI-compatible server, which runs already."),
        )
    ):
        command = option(command)
    return command


def systems_of(options: dict[str, Any]) -> list[Any]:
    """Those that are compared, the tandem last of ours."""
    from bench import systems

    model, own = options["model"], options["serve_options"]
    chosen = [systems.colocated(model, chunk, options["num_colocated"], own) for chunk in options["chunks"]]
    chosen.append(systems.tandem(model, [*own, *options["tandem_options"]]))
    chosen += [systems.vllm(model, chunk or None, options["vllm_dtype"]) for chunk in options["vllm_chunks"]]
    return [*chosen, systems.at(options["url"])] if options["url"] else chosen


def plan_options(command: Callable[..., None]) -> Callable[..., None]:
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


def engine_of(options: dict[str, Any]) -> Any:
    from bench.offline import Engine
    from engine.config import WeightForm

    dtype, weights = DType(options["dtype"]), WeightForm(options["weights"])
    return Engine(options["model"], dtype, weights, options["threads"])
