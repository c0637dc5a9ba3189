"""Options that several commands of the command line share, as decorators."""

import os
import tomllib
from collections.abc import Callable
from pathlib import Path

import click

from core.kv_spec import DType
from core.logs import FORMATS

DTYPES = [dtype.value for dtype in DType]
Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def together(*options: Decorator) -> Decorator:
    """One decorator for all of these."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in options:
            command = option(command)
        return command

    return decorate


def read_config(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    """Options from a file become defaults. A name that is no option is refused: a typing error must not be silent."""
    if value is None:
        return
    try:
        told = tomllib.loads(Path(value).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{value}: {error}") from error
    names = {word.lstrip("-"): p.name for p in context.command.params for word in p.opts if p.name}
    unknown = sorted(set(told) - set(names) - {"config"})
    if unknown or "config" in told:
        raise click.BadParameter(f"{value}: `{(unknown or ['config'])[0]}` is no option of serve")
    context.default_map = {**(context.default_map or {}), **{names[name]: told[name] for name in told}}


def _cores(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    cores = [core.strip() for core in value.split(",") if core]
    if not all(core.isdecimal() and int(core) < (os.cpu_count() or 1) for core in cores):
        raise click.BadParameter(f"cores of this host, with commas between, as 2,3: got {value!r}")
    return tuple(map(int, cores))


model_options = together(
    click.option("--model", default="smollm2", show_default=True, help="Directory, GGUF file or smollm2."),
    click.option("--model-id", default=None, help="What clients write in `model` [from --model]."),
    click.option(
        "--redis-url", default="redis://127.0.0.1:6379/0", show_default=True, envvar="TANDEM_REDIS_URL"
    ),
    click.option("--cluster", default="default", show_default=True, envvar="TANDEM_CLUSTER"),
)


max_queue_option = click.option(
    "--max-queue",
    "max_queue_s",
    default=10.0,
    show_default=True,
    help="Seconds; who would wait longer is refused with 429.",
)


api_keys_option = click.option(
    "--api-keys", default=None, help="File of `tenant key` lines; clients need such a key then [anybody]."
)


observing_options = together(
    click.option(
        "--log-format", type=click.Choice(FORMATS), default="text", show_default=True, help="Of the log."
    ),
    click.option(
        "--otlp",
        default=None,
        envvar=["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"],
        help="Where spans go, over OTLP and gRPC, as http://127.0.0.1:4317 [nowhere].",
    ),
)


routing_options = together(
    click.option(
        "--max-local-tokens",
        default=0,
        show_default=True,
        help="Prompts of which a decode worker lacks no more are computed there, without a handoff.",
    ),
    click.option(
        "--routing",
        type=click.Choice(("prefix", "round_robin")),
        default="prefix",
        show_default=True,
        help="By cached prefixes and load, or each worker in turn.",
    ),
    click.option(
        "--pull-cost",
        "pull_cost_s",
        default=0.003,
        show_default=True,
        help="Seconds that moving a prefix between workers takes beyond its bytes; inf: none is moved.",
    ),
)


pace_option = click.option(
    "--pace",
    default=0.0,
    show_default=True,
    help="Seconds from one decode step to the next, while other workers can use its core.",
)


engine_options = together(
    click.option(
        "--device",
        type=click.Choice(("cpu", "cuda")),
        default="cpu",
        show_default=True,
        help="Where the model and its KV pool are.",
    ),
    click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", show_default=True),
    click.option(
        "--weights",
        type=click.Choice(("stored", "dense")),
        default="stored",
        show_default=True,
        help="A GGUF file's own 4 or 8 bits, or every weight in --dtype.",
    ),
    click.option("--block-size", default=16, show_default=True, help="Tokens of a KV block."),
    click.option("--num-blocks", default=None, type=int, help="Blocks of the KV pool [1 GiB worth]."),
    click.option("--max-batch", default=64, show_default=True, help="Sequences of one step."),
    click.option("--token-budget", default=512, show_default=True, help="Tokens of one step."),
    click.option("--no-prefix-cache", is_flag=True, help="Compute every prompt from its beginning."),
)


disk_options = together(
    click.option(
        "--disk-cache",
        default=None,
        type=click.Path(file_okay=False),
        help="Keep prefixes in this directory as well, over restarts [not].",
    ),
    click.option(
        "--disk-cache-bytes",
        default=8 << 30,
        show_default=True,
        type=click.IntRange(min=1),
        help="At most, of each prefill worker.",
    ),
)


worker_options = together(
    click.option(
        "--id", "worker_id", default=None, help="Stable worker id [random].", envvar="TANDEM_WORKER_ID"
    ),
    click.option(
        "--listen", default="127.0.0.1:0", show_default=True, help="HOST:PORT of the session server."
    ),
    click.option(
        "--advertise",
        default=None,
        help="Host name that others use [the bound host]; auto: this host's address towards Redis.",
    ),
    click.option("--connector", default="auto", show_default=True, help="auto, shm, tcp or ucx."),
    click.option("--transfer-port", default=0, show_default=True, help="Port of tcp or ucx; 0: a free one."),
    click.option("--threads", default=1, show_default=True, help="Compute threads."),
    click.option(
        "--borrow",
        default="",
        callback=_cores,
        help="Cores of others to compute on while they are idle, as 2,3 [none].",
    ),
    click.option("--drain", default=20.0, show_default=True, help="Seconds to finish what runs on SIGTERM."),
)
