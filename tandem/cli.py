"""The command line. Each command is a line or two over the package that does the work, imported only when it runs, so
that a gateway or a client never loads torch."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from typing import Any

import click

from core.errors import ModelLoadError, TandemError
from core.ids import WorkerId, new_worker_id
from core.kv_spec import DType
from core.logs import LogForm, set_up_logs
from core.model_path import public_name
from tandem.options import (
    DTYPES,
    api_keys_option,
    disk_options,
    engine_options,
    max_queue_option,
    model_options,
    observing_options,
    pace_option,
    read_config,
    routing_options,
    worker_options,
)

CONFIGURATION_MISTAKE = 2


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
        disk_cache=options.get("disk_cache"),
        disk_cache_bytes=options.get("disk_cache_bytes", 0),
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
        enable_prefix_cache=not options["no_prefix_cache"],
        log=LogForm(options["log_format"], worker.worker_id),
    )
    return worker, engine


@main.command()
@model_options
@engine_options
@worker_options
@disk_options
@observing_options
def prefill(**options: Any) -> None:
    """Run one prefill worker in the foreground."""
    from prefill_service.main import serve

    _run_worker(serve, "prefill", options)


@main.command()
@model_options
@engine_options
@worker_options
@observing_options
@pace_option
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
@model_options
@click.option(
    "--http", default="127.0.0.1:8000", show_default=True, help="HOST:PORT of the OpenAI endpoints."
)
@click.option("--grpc", default="127.0.0.1:50051", show_default=True, help="HOST:PORT of the gRPC API.")
@click.option("--ready-file", default=None, help="JSON written once requests can be served.")
@max_queue_option
@api_keys_option
@routing_options
@observing_options
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
    callback=read_config,
    help="TOML with these options' values, as `tandem tune` writes it; what is given here comes first.",
)
@max_queue_option
@api_keys_option
@routing_options
@pace_option
@engine_options
@disk_options
@observing_options
def serve(ready_file: str | None, **options: Any) -> None:
    """Start a whole tandem on this host: MODEL is a directory, a GGUF file or smollm2."""
    from core.model_path import resolve_model
    from gateway.tenants import read_tenants
    from tandem import supervisor
    from tandem.layout import ServePlan

    async def work() -> int:
        resolve_model(options["model"])
        if options["api_keys"] is not None:
            read_tenants(options["api_keys"])
        can_borrow = not options.pop("no_borrow")
        has_prefix_cache = not options.pop("no_prefix_cache")
        plan = ServePlan(**options, can_borrow=can_borrow, has_prefix_cache=has_prefix_cache)
        return await supervisor.run(plan, ready_file)

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
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The gateway's HTTP address.")
def flush(url: str) -> None:
    """Have every worker forget the prefixes it has cached; exit 1 unless all were told."""
    from tandem import terminal

    _client(terminal.flush(url))


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
