"""The connector that works anywhere: one TCP connection for a pair of workers, shared by their handoffs.

The receiver reads payloads straight into granted blocks and enforces the grants. Nothing is encrypted and peers are
known by their grants' signatures only: for networks where the workers trust each other.
"""

import asyncio
import socket
from typing import Any

from core.errors import TransferFailed
from kv_transfer.base import TransferOptions
from kv_transfer.channel import Channel
from kv_transfer.listening import Listener
from kv_transfer.receiving import GrantTable
from kv_transfer.sending import LinkSender
from kv_transfer.serving import SessionReceiver
from kv_transfer.sockets import SocketChannel

SCHEME = "tcp"


class TcpReceiver(SessionReceiver):
    """Listens on options.bind_host, loopback unless told otherwise; port 0 picks a free one."""

    def __init__(self, table: GrantTable, options: TransferOptions) -> None:
        super().__init__(table)
        self._options = options
        self._listener: Listener | None = None
        self._address = ""

    @property
    def address(self) -> str:
        assert self._address, "not started"
        return self._address

    async def start(self) -> None:
        family, endpoint = await _resolve(self._options.bind_host, self._options.tcp_port)
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(endpoint)
            self._listener = Listener(listening, self._accept)
        except OSError:
            listening.close()
            raise
        host = self._options.advertised_host or self._options.bind_host
        self._address = join_address(SCHEME, host, listening.getsockname()[1])

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        await self._end_sessions()

    def _accept(self, connected: socket.socket) -> None:
        _tune(connected)
        self._serve(SocketChannel(connected))


class TcpSender(LinkSender):
    async def _connect(self, address: str) -> Channel:
        host, port = split_address(address)
        connecting: socket.socket | None = None
        try:
            family, endpoint = await _resolve(host, port)
            connecting = socket.socket(family, socket.SOCK_STREAM)
            connecting.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connecting, endpoint)
            _tune(connecting)
        except OSError as error:
            _close(connecting)
            raise TransferFailed(f"cannot connect to {address}: {error}") from error
        except BaseException:
            _close(connecting)
            raise
        return SocketChannel(connecting)


def join_address(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of `scheme://host:port`. Raises TransferFailed when it is not one."""
    host, colon, port = address.partition("://")[2].rpartition(":")
    if not (colon and port.isdecimal()):
        raise TransferFailed(f"not a host and port: {address}")
    return host.removeprefix("[").removesuffix("]"), int(port)


async def _resolve(host: str, port: int) -> tuple[int, Any]:
    """Raises OSError when the name means nothing."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, endpoint = found[0]
    return family, endpoint


def _tune(connected: socket.socket) -> None:
    """Small messages are not held back, and a peer whose host has vanished is noticed within some ten seconds."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def _close(connecting: socket.socket | None) -> None:
    if connecting is not None:
        connecting.close()
