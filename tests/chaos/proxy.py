"""Stands between the gateway and one worker's session server, and delays bytes or cuts connections on command.

A worker advertises a host without a port, so the proxy has the worker's port on another loopback address.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from core.child import free_port
from core.worker import Role
from tandem.testing import LocalCluster, ManagedProcess

WORKER_HOST, PROXY_HOST = "127.0.0.1", "127.0.0.2"


class Proxy:
    """While `is_cut` nothing gets through; `delay_s` is added to each read of a connection, either way."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.is_cut = False
        self.num_connections = 0
        self._port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self, port: int = 0) -> None:
        """In front of whoever listens, or will listen, on `port` of WORKER_HOST; 0 picks a free one."""
        self._port = port or free_port(WORKER_HOST)
        self._server = await asyncio.start_server(self._serve, PROXY_HOST, self._port)

    @property
    def arguments(self) -> tuple[str, ...]:
        """What makes a worker be reached through this proxy."""
        return ("--listen", f"{WORKER_HOST}:{self._port}", "--advertise", PROXY_HOST)

    def cut(self) -> None:
        """Reset every connection and refuse new ones until `is_cut` is False again."""
        self.is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    def heal(self) -> None:
        self.is_cut, self.delay_s = False, 0.0

    async def close(self) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        try:
            if not self.is_cut:
                inner_reader, inner_writer = await asyncio.open_connection(WORKER_HOST, self._port)
                ends.append(inner_writer)
                self.num_connections += 1
                self._writers.update(ends)
                await asyncio.gather(self._pump(reader, inner_writer), self._pump(inner_reader, writer))
        except OSError:
            pass
        finally:
            self._writers.difference_update(ends)
            for end in ends:
                end.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            await asyncio.sleep(self.delay_s)
            sink.write(data)
            await sink.drain()
        raise ConnectionResetError


class ProxiedCluster(LocalCluster):
    """A cluster whose gateway reaches each worker through a proxy of its own, kept when the worker starts again."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.proxies: dict[str, Proxy] = {}

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        for proxy in self.proxies.values():
            await proxy.close()

    async def add_worker(
        self,
        role: Role,
        name: str,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> ManagedProcess:
        if name not in self.proxies:
            proxy = self.proxies[name] = Proxy()
            await proxy.start()
        return await super().add_worker(role, name, [*arguments, *self.proxies[name].arguments], environment)
