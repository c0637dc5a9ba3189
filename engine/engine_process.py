"""The service's handle on its engine process: start, talk, stop. Imports no torch.

The service makes the KV pool's memfd and passes it down, so that connectors and engine share it from the start; it
is new for each start, and with it the worker's epoch.
"""

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable

import msgspec

from core.errors import EngineFailed, ModelLoadError
from core.kv_region import KVRegion
from engine.channel import ServiceChannel
from engine.config import EngineConfig
from engine.engine_geometry import EngineGeometry
from engine.messages import AnyCommand, Commands, Loading, Report

STOP_TIMEOUT_S = 5.0


class EngineProcess:
    """Owns the child process, the channel and the pool's region."""

    def __init__(self, child: subprocess.Popen[bytes], channel: ServiceChannel, region: KVRegion) -> None:
        self._child = child
        self._channel = channel
        self._first = Report([])
        self.region = region

    @classmethod
    async def start(
        cls,
        module: str,
        config: EngineConfig,
        geometry: EngineGeometry,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> "EngineProcess":
        """Run `python -m module` and wait until its weights are loaded. Raises ModelLoadError for what it cannot load
        or have here, EngineFailed when it ended."""
        region = KVRegion.create(geometry.kv_spec.block_bytes, geometry.num_blocks)
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", module, "--channel-fd", str(theirs.fileno())]
        command += ["--pool-fd", str(region.fd), "--config", msgspec.json.encode(config).decode()]
        child = subprocess.Popen(command, pass_fds=(theirs.fileno(), region.fd))  # noqa: ASYNC220 - at start
        theirs.close()
        engine = cls(child, await ServiceChannel.open(ours), region)
        try:
            await engine._wait_ready(on_progress)
        except BaseException:
            await engine.stop()
            raise
        return engine

    async def _wait_ready(self, on_progress: Callable[[int, int], None]) -> None:
        while isinstance(message := await self._channel.receive(), Loading):
            on_progress(message.done_bytes, message.total_bytes)
        if message is None:
            raise EngineFailed("the engine process ended while loading")
        if message.failure:
            raise ModelLoadError(message.failure)
        self._first = message

    @property
    def pid(self) -> int:
        return self._child.pid

    def send(self, *commands: AnyCommand) -> None:
        """Queue commands for the engine's next step."""
        self._channel.send(Commands(list(commands)))

    async def reports(self) -> AsyncIterator[Report]:
        """Every report until the engine is gone; the first says that it is ready, and its load."""
        yield self._first
        while isinstance(message := await self._channel.receive(), Report):
            yield message

    async def stop(self) -> None:
        """Close the channel, wait for the child (SIGKILL after a while) and unmap the pool."""
        self._channel.close()
        try:
            await asyncio.to_thread(self._child.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            await asyncio.to_thread(self._child.wait)
        self.region.close()
