"""The command line. Each command is a line or two over the package that does the work, imported only when it runs, so
that a gateway or a client never loads torch."""

import asyncio
import os
import sys
import tomllib
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from core.errors import ModelLoadError, TandemError
from core.ids import WorkerId, new_worker_id
from core.kv_spec import DType
from core.logs import FORMATS, LogForm, set_up_logs
from core.model_path import public_name

CONFIGURATION_MISTAKE = 2
DTYPES = [dtype.value for dtype in DType]


def run(work: Coroutine[Any, Any, int], log: LogForm) -> None:
    """Run a service to its end and exit with its status; a configuration mistake is one line and status 2."""
    set_up_logs(log)
    try:
        status = asyncio.run(work)
    except (ModelLoadError, ValueError, OSError) as error:
        click.echo(f"tandem: {error}", err=True)
        status = CONFIGURATION_MISTAKE
    sys.exit(status)


class _Commands(click.Group):
    """With those of `bench`, which images do not have: loaded when one is asked for, or all are listed."""

    LATER = ("bench", "simulate", "tune")

    def list_commands(self, context: click.Context) -> list[str]:
        later = self.LATER if find_spec("bench") is not None else ()
        return sorted([*super().list_commands(context), *later])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name in self.LATER and find_spec("bench") is not None:
            from bench import commands

            return {"bench": commands.bench, "simulate": commands.simulate, "tune": commands.tune}[name]
        return super().get_command(context, name)


@click.group(cls=_Commands)
def main() -> None:
    """Serve large language models with prefill and decode on separate workers."""


def _model_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option(
            "--model", default="smollm2", show_default=True, help="Directory, GGUF file or smollm2."
        ),
        click.option("--model-id", default=None, help="What clients write in `model` [from --model]."),
        click.option(
            "--redis-url", default="redis://127.0.0.1:6379/0", show_default=True, envvar="TANDEM_REDIS_URL"
        ),
        click.option("--cluster", default="default", show_default=True, envvar="TANDEM_CLUSTER"),
    ):
        command = option(command)
    return command


def _max_queue_option(command: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--max-queue",
        "max_queue_s",
        default=10.0,
        show_default=True,
        help="Seconds; who would wait longer is refused with 429.",
    )(command)


def _observing_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option(
            "--log-format", type=click.Choice(FORMATS), default="text", show_default=True, help="Of the log."
        ),
        click.option(
            "--otlp",
            default=None,
            envvar=["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"],
            help="Where spans go, over OTLP and gRPC, as http://127.0.0.1:4317 [nowhere].",
        ),
    ):
        command = option(command)
    return command


def _max_local_tokens_option(command: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--max-local-tokens",
        default=0,
        show_default=True,
        help="Prompts of which a decode worker lacks no more are computed there, without a handoff.",
    )(command)


def _pace_option(command: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--pace",
        default=0.0,
        show_default=True,
        help="Seconds from one decode step to the next, while other workers can use its core.",
    )(command)


def _engine_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
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
    ):
        command = option(command)
    return command


def _read_config(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
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


def _worker_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
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
        click.option(
            "--transfer-port", default=0, show_default=True, help="Port of tcp or ucx; 0: a free one."
        ),
        click.option("--threads", default=1, show_default=True, help="Compute threads."),
        click.option(
            "--borrow",
            default="",
            callback=_cores,
            help="Cores of others to compute on while they are idle, as 2,3 [none].",
        ),
        click.option(
            "--drain", default=20.0, show_default=True, help="Seconds to finish what runs on SIGTERM."
        ),
    ):
        command = option(command)
    return command


def _configs(options: dict[str, Any]) -> tuple[Any, Any]:
    """The two halves of a worker's configuration from its options. Raises ValueError."""
    from cluster.worker_server import WorkerConfig
    from engine.config import EngineConfig, WeightForm

    worker = WorkerConfig(
        worker_id=WorkerId(options["worker_id"]),
        model=options["model_id"] or public_name(options["model"]),
        listen=options["listen"],
        advertised_host=options["advertise"],
        redis_url=options["redis_url"],
        cluster=options["cluster"],
        connector=options["connector"],
        transfer_port=options["transfer_port"],
        drain_s=options["drain"],
        otlp=options["otlp"],
    )
    engine = EngineConfig(
        model=options["model"],
        dtype=DType(options["dtype"]),
        device=options["device"],
        weights=WeightForm(options["weights"]),
        block_size=options["block_size"],
        num_blocks=options["num_blocks"],
        max_batch=options["max_batch"],
        token_budget=options["token_budget"],
        num_threads=options["threads"],
        max_local_tokens=options.get("max_local_tokens", 0),
        pace_s=options.get("pace", 0.0),
        borrowed_cores=options["borrow"],
        log=LogForm(options["log_format"], worker.worker_id),
    )
    return worker, engine


@main.command()
@_model_options
@_engine_options
@_worker_options
@_observing_options
def prefill(**options: Any) -> None:
    """Run one prefill worker in the foreground."""
    from prefill_service.main import serve

    _run_worker(serve, "prefill", options)


@main.command()
@_model_options
@_engine_options
@_worker_options
@_observing_options
@_pace_option
@click.option(
    "--max-local-tokens",
    default=1024,
    show_default=True,
    help="Prompts that it computes itself, in tokens that are not cached; any, from the context's length on.",
)
def decode(**options: Any) -> None:
    """Run one decode worker in the foreground."""
    from decode_service.main import serve

    _run_worker(serve, "decode", options)


def _run_worker(serve: Callable[..., Coroutine[Any, Any, int]], role: str, options: dict[str, Any]) -> None:
    options["worker_id"] = options["worker_id"] or new_worker_id(role)

    async def work() -> int:
        if options["advertise"] == "auto":
            from tandem.health import address_towards

            options["advertise"] = await address_towards(options["redis_url"])
        return await serve(*_configs(options))

    run(work(), LogForm(options["log_format"], options["worker_id"]))


@main.command()
@_model_options
@click.option(
    "--http", default="127.0.0.1:8000", show_default=True, help="HOST:PORT of the OpenAI endpoints."
)
@click.option("--grpc", default="127.0.0.1:50051", show_default=True, help="HOST:PORT of the gRPC API.")
@click.option("--ready-file", default=None, help="JSON written once requests can be served.")
@_max_queue_option
@_max_local_tokens_option
@_observing_options
def gateway(log_format: str, **options: Any) -> None:
    """Run one gateway in the foreground."""
    from gateway.config import GatewayConfig
    from gateway.main import serve

    run(serve(GatewayConfig(**options)), LogForm(log_format, "gateway"))


@main.command()
@click.argument("model", default="smollm2")
@click.option("--model-id", default=None, help="What clients write in `model` [from MODEL].")
@click.option("--prefill", "num_prefill", default=None, type=int, help="Prefill workers [1].")
@click.option("--decode", "num_decode", default=None, type=int, help="Decode workers [1].")
@click.option(
    "--colocated",
    "num_colocated",
    default=0,
    help="So many engines that do both instead of the tiers, with chunked prefill.",
)
@click.option("--connector", default="auto", show_default=True, help="auto, shm, tcp or ucx.")
@click.option(
    "--http", default="127.0.0.1:8000", show_default=True, help="HOST:PORT of the OpenAI endpoints."
)
@click.option("--grpc", default="127.0.0.1:50051", show_default=True, help="HOST:PORT of the gRPC API.")
@click.option("--redis-url", default="", help="A Redis or Valkey to use [an embedded Valkey].")
@click.option("--ready-file", default=None, help="JSON written once requests can be served.")
@click.option("--no-borrow", is_flag=True, help="Workers leave each other's idle cores alone.")
@click.option(
    "--config",
    default=None,
    is_eager=True,
    expose_value=False,
    callback=_read_config,
    help="TOML with these options' values, as `tandem tune` writes it; what is given here comes first.",
)
@_max_queue_option
@_max_local_tokens_option
@_pace_option
@_engine_options
@_observing_options
def serve(ready_file: str | None, **options: Any) -> None:
    """Start a whole tandem on this host: MODEL is a directory, a GGUF file or smollm2."""
    from core.model_path import resolve_model
    from tandem import supervisor
    from tandem.layout import ServePlan

    async def work() -> int:
        resolve_model(options["model"])
        can_borrow = not options.pop("no_borrow")
        return await supervisor.run(ServePlan(**options, can_borrow=can_borrow), ready_file)

    run(work(), LogForm(options["log_format"], "serve"))


@main.command()
@click.argument("prompt")
@click.option("--grpc", default="127.0.0.1:50051", show_default=True)
@click.option("--max-tokens", default=64, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--seed", default=None, type=int)
def complete(prompt: str, grpc: str, max_tokens: int, temperature: float, seed: int | None) -> None:
    """Complete PROMPT and show where the time went."""
    from tandem import terminal

    _client(terminal.complete(grpc, prompt, max_tokens, temperature, seed))


@main.command()
@click.option("--grpc", default="127.0.0.1:50051", show_default=True)
@click.option("--max-tokens", default=512, show_default=True)
@click.option("--temperature", default=0.7, show_default=True)
def chat(grpc: str, max_tokens: int, temperature: float) -> None:
    """Chat with the model; an empty line or Ctrl-D ends it."""
    from tandem import terminal

    _client(terminal.chat(grpc, max_tokens, temperature))


@main.command()
@click.option("--model", default="smollm2", show_default=True)
@click.option("--url", default=None, help="A running system to check [starts its own, over each connector].")
@click.option("--connectors", default="shm,tcp,ucx", show_default=True, help="Which to start it over.")
@click.option(
    "--dtype", type=click.Choice(DTYPES), default="float32", show_default=True, help="Of those it starts."
)
@click.option("--short", is_flag=True, help="Six prompts instead of 26.")
@click.option("--transformers/--no-transformers", default=True, help="Ask transformers as well.")
@click.option("--json", "as_json", is_flag=True)
def verify(
    model: str,
    url: str | None,
    connectors: str,
    dtype: str,
    short: bool,
    transformers: bool,
    as_json: bool,
) -> None:
    """Compare the tandem with one process, token for token; exit 1 unless all agree."""
    from tandem import served
    from tandem import verify as verification

    try:
        names, own_dtype = connectors.split(","), DType(dtype)
        sys.exit(served.run(verification.run(model, url, names, short, as_json, transformers, own_dtype)))
    except TandemError as error:
        click.echo(f"tandem: {error}", err=True)
        sys.exit(1)


@main.command()
@click.argument("address")
@click.option(
    "--timeout", "timeout_s", default=3.0, show_default=True, help="Seconds to wait for the answer."
)
def health(address: str, timeout_s: float) -> None:
    """Ask the gateway or worker at ADDRESS (its gRPC HOST:PORT) whether it serves; exit 0 if so, else 1."""
    from tandem.health import check

    _client(check(address, timeout_s))


@main.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True)
@click.option("--once", is_flag=True, help="Print it once and exit.")
def top(url: str, once: bool) -> None:
    """Workers, blocks, requests by stage, rates and latencies, live; q quits."""
    from tandem.top import top as show

    _client(show(url, once))


def _client(work: Coroutine[Any, Any, None]) -> None:
    """Run a client; an error is one line and status 1."""
    try:
        asyncio.run(work)
    except TandemError as error:
        click.echo(f"tandem: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
