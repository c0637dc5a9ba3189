"""One connection between two workers: ordered messages, and the bytes of runs. Knows nothing of grants or transfers.

Each connector is a Channel and a way to get one; everything above it (`sending`, `serving`) is the same for all.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol, TypeVar

from core.errors import TransferFailed
from core.ids import BlockId
from core.kv_region import KVRegion
from kv_transfer.messages import Message, Welcome

T = TypeVar("T")


class Sink(Protocol):
    """Where an incoming payload goes. Memory may be written only inside a window; what a window shows (the granted
    blocks, or scratch once the handoff was cancelled) may differ from one window to the next."""

    @property
    def num_bytes(self) -> int: ...

    def window(self) -> AbstractContextManager[memoryview]: ...


class Channel(ABC):
    """Both ends may send at any time and from several tasks; one task receives. Peer loss and malformed input are
    TransferFailed, after which the channel is of no more use and its owner closes it."""

    carries_payload: ClassVar[bool] = True
    """Whether the receiver writes its own pool (payloads travel), or the sender does (`place`)."""

    def __init__(self) -> None:
        self._sending = asyncio.Lock()
        self._work: set[asyncio.Future[Any]] = set()
        self._is_closing = False
        self._closed = asyncio.Event()

    async def send(self, message: Message, payload: memoryview | None = None) -> None:
        """Whole and in order; returns when `payload` may change again. If it is interrupted half-way (an error, or
        the calling task cancelled) the channel is closed, because the peer could not find the next message."""
        async with self._sending:
            self._check_open()
            try:
                await self._send(message, payload)
            except BaseException:
                self.close()
                raise

    @abstractmethod
    async def receive(self) -> Message: ...

    @abstractmethod
    async def receive_payload(self, sink: Sink) -> None:
        """The bytes that belong to the Data message just received, `sink.num_bytes` of them."""

    async def welcome(self, message: Welcome, region: KVRegion) -> None:
        """The receiver's answer to Hello, with whatever the sender needs to reach `region`."""
        await self.send(message)

    def welcomed(self, message: Welcome) -> None:
        """The sender's side of `welcome`. Raises TransferFailed."""
        return

    def place(self, destination: BlockId, source: memoryview) -> None:
        """Where the sender writes: copy `source` into the peer's pool. Called in a worker thread (`in_thread`)."""
        return

    async def drain(self) -> None:
        """For a receiver that will not listen any more: returns when the peer can write no more into our pool."""
        return

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in a worker thread. The transport is not closed before it has ended, even if the calling task
        is cancelled or `close` was called: our end of file promises that we touch no pool any more."""
        self._check_open()
        future = asyncio.get_running_loop().run_in_executor(None, work)
        self._work.add(future)
        future.add_done_callback(self._work_ended)
        return await asyncio.shield(future)

    def close(self) -> None:
        """Wakes whoever waits in this channel with TransferFailed. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        self._interrupt()
        self._close_if_idle()

    async def wait_closed(self) -> None:
        """After close(): returns when the transport is released."""
        await self._closed.wait()

    @abstractmethod
    async def _send(self, message: Message, payload: memoryview | None) -> None: ...

    @abstractmethod
    def _interrupt(self) -> None:
        """Wake pending operations with TransferFailed, leaving the transport open."""

    @abstractmethod
    def _close_transport(self) -> None: ...

    def _check_open(self) -> None:
        if self._is_closing:
            raise TransferFailed("connection closed")

    def _work_ended(self, future: asyncio.Future[Any]) -> None:
        self._work.discard(future)
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._is_closing and not self._work and not self._closed.is_set():
            self._close_transport()
            self._closed.set()
