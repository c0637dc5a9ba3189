"""The connector for two workers of one host: the sender maps the receiver's pool and copies straight into it.

    sender                      Unix socket (control only)                receiver
    Hello                ─────────────────────────────►
                         ◄─────────────────────────────   Welcome + the pool's memfd (SCM_RIGHTS)
    Open                 ─────────────────────────────►   the grant is checked before anything is written
                         ◄─────────────────────────────   Accepted
    copy into the pool   ════════ shared memory ══════►
    Data, Trailer        ─────────────────────────────►

The sender is trusted to write only what it was granted. Its end of file says that it writes no more: it closes the
socket only after its copies have ended, and the kernel does so only after its threads are dead.
"""

import asyncio
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import ClassVar

import numpy as np

from core.errors import TransferFailed
from core.ids import BlockId, host_id
from core.kv_region import KVRegion
from kv_transfer.channel import Channel, Sink
from kv_transfer.listening import Listener
from kv_transfer.messages import Welcome
from kv_transfer.receiving import GrantTable
from kv_transfer.sending import LinkSender
from kv_transfer.serving import SessionReceiver
from kv_transfer.sockets import SocketChannel

SCHEME = "shm"


class _ShmChannel(SocketChannel):
    carries_payload: ClassVar[bool] = False

    async def receive_payload(self, sink: Sink) -> None:
        """The bytes are already in place."""
        return


class _PoolChannel(_ShmChannel):
    """The receiver's end: the pool's descriptor travels with the first byte of Welcome."""

    _passed_fd: int | None = None

    async def welcome(self, message: Welcome, region: KVRegion) -> None:
        self._passed_fd = region.fd
        await self.send(message)

    async def _write(self, data: memoryview) -> None:
        num_written = 0
        if self._passed_fd is not None:
            fd, self._passed_fd = self._passed_fd, None
            await self._writable()
            try:
                num_written = socket.send_fds(self._socket, [data], [fd])
            except OSError as error:
                raise TransferFailed(f"cannot pass the pool: {error}") from error
        await super()._write(data[num_written:])


class _WriterChannel(_ShmChannel):
    """The sender's end: maps the receiver's pool and writes into it."""

    _fd: int | None = None
    _pool: KVRegion | None = None

    def welcomed(self, message: Welcome) -> None:
        fd, self._fd = self._fd, None
        if fd is None:
            raise TransferFailed("the receiver passed no pool")
        try:
            self._pool = KVRegion.attach(fd, message.identity.spec.block_bytes, message.num_blocks)
        except (ValueError, OSError) as error:
            os.close(fd)
            raise TransferFailed(f"cannot map the receiver's pool: {error}") from error

    def place(self, destination: BlockId, source: memoryview) -> None:
        assert self._pool is not None
        with self._pool.view(destination, len(source) // self._pool.block_bytes) as memory:
            _copy(memory, source)

    def _receive_into(self, buffer: memoryview) -> int:
        if self._pool is not None or self._fd is not None:
            return super()._receive_into(buffer)
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, len(buffer), 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise TransferFailed(f"connection lost: {error}") from error
        self._fd = fds[0] if fds else None
        if not data:
            raise TransferFailed("connection closed by the peer")
        buffer[: len(data)] = data
        return len(data)

    def _close_transport(self) -> None:
        if self._pool is not None:
            self._pool.close()
        if self._fd is not None:
            os.close(self._fd)
        super()._close_transport()


def _copy(destination: memoryview, source: memoryview) -> None:
    """Releases the GIL; the arrays are gone on return, so that both views can be released."""
    np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(source, np.uint8))


class ShmReceiver(SessionReceiver):
    """Listens on a socket that only this user can reach: mode 0600 in a directory of mode 0700."""

    def __init__(self, table: GrantTable) -> None:
        super().__init__(table)
        self._path = ""
        self._listener: Listener | None = None

    @property
    def address(self) -> str:
        assert self._listener is not None, "not started"
        return f"{SCHEME}://{host_id()}{self._path}"

    async def start(self) -> None:
        self._path = str(Path(tempfile.mkdtemp(prefix="tandem-")) / "kv")
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(self._path)
            os.chmod(self._path, 0o600)
            self._listener = Listener(listening, lambda connected: self._serve(_PoolChannel(connected)))
        except OSError:
            listening.close()
            shutil.rmtree(Path(self._path).parent)
            raise

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            shutil.rmtree(Path(self._path).parent, ignore_errors=True)
        await self._end_sessions()


class ShmSender(LinkSender):
    async def _connect(self, address: str) -> Channel:
        host, path = split_address(address)
        if host != host_id():
            raise TransferFailed(f"{address} is on another host")
        connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connecting.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connecting, path)
        except OSError as error:
            connecting.close()
            raise TransferFailed(f"cannot connect to {address}: {error}") from error
        except BaseException:
            connecting.close()
            raise
        return _WriterChannel(connecting)


def split_address(address: str) -> tuple[str, str]:
    """(host id, socket path) of `shm://<host id>/<path>`."""
    host, slash, path = address.removeprefix(f"{SCHEME}://").partition("/")
    return host, slash + path
