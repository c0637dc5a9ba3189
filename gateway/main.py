"""One gateway as a process: HTTP and gRPC fronts over one core. `tandem gateway` runs it."""

import asyncio
import contextlib
import gc
import logging
import math
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from cluster.background import keep_running
from cluster.handoff_rows import HandoffRows
from cluster.registry import Registry
from cluster.store import Store
from cluster.tracing import start_tracing
from core.model_path import public_name, resolve_model
from core.ready_file import write_ready_file
from gateway.config import GatewayConfig
from gateway.front import grpc_server
from gateway.front.body_parser import BodyParser
from gateway.front.http_server import HttpFront
from gateway.metrics import GatewayMetrics
from gateway.routing.admission import Admission
from gateway.routing.fleet import Fleet
from gateway.routing.orchestrator import Orchestrator
from gateway.routing.prefix_index import PrefixIndex
from gateway.routing.pulls import Pulls
from gateway.routing.router import RoundRobin, choose_route
from gateway.serving import NO_TENANTS, Serving
from gateway.tenants import read_tenants
from gateway.text.grammar_checker import GrammarChecker
from gateway.text.tokenizer import TextTokenizer
from tokenizer.files import load_tokenizer_files

logger = logging.getLogger(__name__)
STOP_S = 20


async def serve(config: GatewayConfig) -> int:
    """Until SIGTERM or SIGINT; the exit status. Raises ModelLoadError, OSError and ValueError for a wrong
    configuration."""
    tenants = read_tenants(config.api_keys) if config.api_keys is not None else NO_TENANTS
    listener = listen(config.http, config.stall_limit_s)
    model = resolve_model(config.model)
    tokenizer = TextTokenizer(await asyncio.to_thread(load_tokenizer_files, model))
    store = Store(config.redis_url, config.cluster)
    prefixes = PrefixIndex(store)
    model_id = config.model_id or public_name(config.model)
    fleet = Fleet(Registry(store), model_id, prefixes)
    metrics = GatewayMetrics(lambda: fleet.links)
    rows = HandoffRows(store)
    pulls = Pulls() if math.isfinite(config.pull_cost_s) else None
    orchestrator = Orchestrator(
        fleet,
        prefixes,
        rows,
        metrics,
        Admission(config.max_queue_s),
        config.max_local_tokens,
        RoundRobin() if config.routing == "round_robin" else choose_route,
        pulls,
        config.pull_cost_s,
    )
    grammars = GrammarChecker(model)
    tracing = start_tracing(config.otlp, "tandem-gateway", fleet.gateway_id)
    serving = Serving(
        model_id,
        tokenizer,
        fleet,
        orchestrator,
        metrics,
        grammars,
        config.request_timeout_s,
        tracing,
        tenants,
    )
    loops = {"discovery": fleet.run, "handoff rows": rows.run, "prefix index": prefixes.run}
    background = [asyncio.create_task(keep_running(name, loop)) for name, loop in loops.items()]
    gc.collect()
    gc.freeze()  # nothing that was loaded is looked at again: a full collection would hold everybody up for it
    try:
        await _run_fronts(config, serving, listener)
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        if pulls is not None:
            await pulls.close()
        await grammars.close()
        await store.close()
        await tracing.close()
    return 0


class _HttpServer(uvicorn.Server):
    """Leaves signals to the gateway."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _run_fronts(config: GatewayConfig, serving: Serving, listener: socket.socket) -> None:
    """Serve on both ports, tell when ready, stop on a signal: unready first, streams may finish, then close."""
    bodies = BodyParser()
    front = HttpFront(serving, bodies, config.max_body_bytes)
    http = _HttpServer(
        uvicorn.Config(
            front.app,
            log_config=None,
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=STOP_S,
        )
    )
    rpc, healthy = grpc_server.create_server(serving, bodies, config.stall_limit_s)
    try:
        grpc_port = rpc.add_insecure_port(config.grpc)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {config.grpc}: {error}") from error
    serving.grpc_address = f"{config.grpc.rpartition(':')[0]}:{grpc_port}"
    await rpc.start()
    serving_http = asyncio.create_task(http.serve(sockets=[listener]))
    announced = asyncio.create_task(_announce(config, serving, healthy, listener))
    await _wait_for_signal()
    await grpc_server.set_serving(healthy, False)
    announced.cancel()
    http.should_exit = True
    await asyncio.gather(rpc.stop(STOP_S), serving_http)
    await bodies.close()


async def _announce(
    config: GatewayConfig, serving: Serving, healthy: grpc_server.HealthServicer, listener: socket.socket
) -> None:
    """Once both tiers are connected: say so, and write the ready file."""
    await grpc_server.set_serving(healthy, False)
    await serving.fleet.wait_ready()
    await grpc_server.set_serving(healthy, True)
    host, http_port = listener.getsockname()[:2]
    addresses = {"http": f"http://{host}:{http_port}", "grpc": serving.grpc_address}
    logger.info("ready: %s and gRPC on %s", addresses["http"], addresses["grpc"])
    if config.ready_file is not None:
        write_ready_file(
            Path(config.ready_file), {**addresses, "redis_url": config.redis_url, "pids": [os.getpid()]}
        )


def listen(address: str, stall_limit_s: float) -> socket.socket:
    """A bound TCP socket for host:port. Of the connections accepted from it, the kernel breaks one whose peer takes
    nothing of what is sent for `stall_limit_s`, and holds back no small piece until the one before is acknowledged
    (asyncio sees to that only for sockets that name their protocol). Raises OSError naming the address."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host.strip("[]"), int(port)), family=family)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {address}: {error.strerror}") from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * stall_limit_s))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


async def _wait_for_signal() -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
