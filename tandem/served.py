"""Servers as children of a command that talks to them as any client does: `verify` and the benchmarks."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx

from core.errors import Unavailable

T = TypeVar("T")
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0
LOG_TAIL = 2000


def run(work: Coroutine[Any, Any, T]) -> T:
    """To its end, in the main thread. SIGTERM ends it as Ctrl-C does: with the servers that it started."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return asyncio.run(work)


@contextlib.asynccontextmanager
async def served(arguments: Sequence[str]) -> AsyncIterator[dict[str, Any]]:
    """The addresses, as in a ready file, of a tandem of its own on free ports. Raises Unavailable when it does not
    start."""
    with tempfile.TemporaryDirectory(prefix="tandem-served-") as directory:
        ready = Path(directory) / "ready.json"
        command = [sys.executable, "-m", "tandem.cli", "serve", *arguments, "--ready-file", str(ready)]
        command += ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]

        async def is_ready() -> bool:
            return ready.exists()

        async with child(command, is_ready, START_TIMEOUT_S):
            yield json.loads(ready.read_text())


@contextlib.asynccontextmanager
async def child(
    command: Sequence[str],
    is_ready: Callable[[], Awaitable[bool]],
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[None]:
    """A process and what it starts, ended with the block. Raises Unavailable, with the end of what it wrote, when it
    ends or takes too long before it is ready."""
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=log,
            stderr=log,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            if not await _wait_until(is_ready, process, timeout_s):
                log.seek(0)
                tail = log.read().decode(errors="replace")[-LOG_TAIL:]
                raise Unavailable(f"{how_it_ended(process.returncode)}\n{tail}")
            yield
        finally:
            await _end(process)


async def _wait_until(
    is_ready: Callable[[], Awaitable[bool]], process: asyncio.subprocess.Process, timeout_s: float
) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while process.returncode is None:
                if await is_ready():
                    return True
                await asyncio.sleep(0.1)  # a foreign process has nothing that could wake us
    return False


def how_it_ended(status: int | None) -> str:
    """In words; None is a process that still runs."""
    if status is None:
        return "it was not ready in time"
    if status < 0:
        return f"it was ended by {signal.Signals(-status).name}"
    return f"it exited with status {status}"


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ask; then end the whole session that it leads."""
    if process.returncode is None:
        process.terminate()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


async def answers(url: str) -> bool:
    """Whether a GET gets status 200."""
    async with httpx.AsyncClient(timeout=5) as client:
        try:
            return (await client.get(url)).status_code == 200
        except httpx.HTTPError:
            return False


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
