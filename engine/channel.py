"""Length-prefixed msgpack over a socket pair: the pipe between a service process and its engine process.

    [ u32 little-endian length | msgpack ] ...

Both ends belong to one worker and one user; still, nothing received can execute code.
"""

import asyncio
import contextlib
import os
import select
import socket
import struct

import msgspec

from engine.messages import Commands, Loading, Report, Upward

_HEADER = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


def _frame(message: object) -> bytes:
    body = _encoder.encode(message)
    return _HEADER.pack(len(body)) + body


class EngineChannel:
    """The engine's end: blocking, one thread, but for wake()."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._decoder = msgspec.msgpack.Decoder(Commands)
        self._buffer = bytearray()
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def wake(self) -> None:
        """From any thread: the receive() that waits, or the next one, returns at once."""
        os.eventfd_write(self._wakes, 1)

    def send(self, message: Upward) -> None:
        """Raises ConnectionError when the service is gone."""
        self._connection.sendall(_frame(message))

    def receive(self, timeout_s: float | None) -> list[Commands] | None:
        """Every message that is there, waiting up to `timeout_s` (None: for ever) for the first one or wake(). None
        when the service closed its end. Raises msgspec.MsgspecError for what is no message: the two ends do
        not match."""
        connection = self._connection.fileno()
        ready, _, _ = select.select([connection, self._wakes], [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakes)
        if connection in ready:
            data = self._read()
            if not data:
                return None
            self._buffer += data
        return self._take()

    def _read(self) -> bytes:
        """Empty at the end, also when the service closed without having read all that was sent to it."""
        try:
            return self._connection.recv(1 << 20)
        except ConnectionResetError:
            return b""

    def _take(self) -> list[Commands]:
        messages = []
        while len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + length
            if len(self._buffer) < end:
                break
            messages.append(self._decoder.decode(bytes(self._buffer[_HEADER.size : end])))
            del self._buffer[:end]
        return messages


class ServiceChannel:
    """The service's end: asyncio."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder: msgspec.msgpack.Decoder[Report | Loading] = msgspec.msgpack.Decoder(Upward)

    @classmethod
    async def open(cls, connection: socket.socket) -> "ServiceChannel":
        connection.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=connection, limit=1 << 24))

    def send(self, commands: Commands) -> None:
        self._writer.write(_frame(commands))

    async def receive(self) -> Upward | None:
        """The next message; None when the engine is gone."""
        try:
            (length,) = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
            return self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionResetError):
            return None

    def close(self) -> None:
        self._writer.close()
