"""A channel over a connected stream socket, on any event loop. Knows nothing of addresses or transfers.

    | "TKV1" | u32 length | message, at most MAX_MESSAGE_BYTES | payload of a Data message |

Nothing is allocated for a frame before its first eight bytes are right, and no pool memory is touched across an
await: a payload is received, when the socket is readable, by a system call straight into its place.
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any

from core.errors import TransferFailed
from kv_transfer.channel import Channel, Sink
from kv_transfer.messages import MAX_MESSAGE_BYTES, Message, decode, encode

_MAGIC = b"TKV1"
_PREFIX = struct.Struct("<4sI")
_MAX_SYSCALL_BYTES = 1 << 20
_STALL_TIMEOUT_S = 20.0


class SocketChannel(Channel):
    """Owns the socket. A peer that takes no byte for _STALL_TIMEOUT_S while we have some to send is given up."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__()
        connected.setblocking(False)
        self._socket = connected
        self._loop = asyncio.get_running_loop()
        self._waiters: set[asyncio.Future[None]] = set()

    async def receive(self) -> Message:
        prefix = bytearray(_PREFIX.size)
        await self._receive_prefix(memoryview(prefix))
        magic, num_bytes = _PREFIX.unpack(prefix)
        if magic != _MAGIC or num_bytes > MAX_MESSAGE_BYTES:
            raise TransferFailed("malformed frame")
        message = bytearray(num_bytes)
        await self._fill(memoryview(message))
        return decode(message)

    async def receive_payload(self, sink: Sink) -> None:
        offset, num_bytes = 0, sink.num_bytes
        while offset < num_bytes:
            await self._readable()
            with sink.window() as memory:
                offset += self._receive_into(memory[offset : offset + _MAX_SYSCALL_BYTES])

    async def drain(self) -> None:
        """See `Channel.drain`. Our end is shut so that the peer notices, theirs is read to its end."""
        if self.carries_payload:
            return
        junk = bytearray(4096)
        try:
            self._socket.shutdown(socket.SHUT_WR)
            while True:
                await self._readable()
                self._receive_into(memoryview(junk))
        except (TransferFailed, OSError):
            return

    async def _send(self, message: Message, payload: memoryview | None) -> None:
        encoded = encode(message)
        await self._write(memoryview(_PREFIX.pack(_MAGIC, len(encoded)) + encoded))
        if payload is not None:
            await self._write(payload)

    async def _write(self, data: memoryview) -> None:
        offset = 0
        while offset < len(data):
            try:
                offset += self._socket.send(data[offset : offset + _MAX_SYSCALL_BYTES])
            except BlockingIOError:
                await self._writable()
            except OSError as error:
                raise TransferFailed(f"connection lost: {error}") from error

    async def _receive_prefix(self, prefix: memoryview) -> None:
        await self._fill(prefix)

    async def _fill(self, buffer: memoryview) -> None:
        offset = 0
        while offset < len(buffer):
            await self._readable()
            offset += self._receive_into(buffer[offset:])

    def _receive_into(self, buffer: memoryview) -> int:
        """Bytes received, 0 when there are none after all. Raises TransferFailed at the end of the stream."""
        try:
            num_bytes = self._socket.recv_into(buffer)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise TransferFailed(f"connection lost: {error}") from error
        if num_bytes == 0:
            raise TransferFailed("connection closed by the peer")
        return num_bytes

    async def _readable(self) -> None:
        await self._ready(self._loop.add_reader, self._loop.remove_reader)

    async def _writable(self) -> None:
        try:
            async with asyncio.timeout(_STALL_TIMEOUT_S):
                await self._ready(self._loop.add_writer, self._loop.remove_writer)
        except TimeoutError as error:
            raise TransferFailed(f"the peer took nothing for {_STALL_TIMEOUT_S} s") from error

    async def _ready(self, add: Callable[..., None], remove: Callable[[int], Any]) -> None:
        self._check_open()
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.add(waiter)
        add(self._socket.fileno(), _wake, waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)
            if not self._is_closing:
                remove(self._socket.fileno())

    def _interrupt(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(TransferFailed("connection closed"))

    def _close_transport(self) -> None:
        self._socket.close()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
