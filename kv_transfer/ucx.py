"""The connector over UCX: shared memory, TCP or RDMA, whichever the library finds between two workers.

The same framing as on a socket, in tagged messages: a prefix, the message, and a payload received straight into
granted blocks. Runs on `ucxx`, or on its predecessor `ucp` where only that is installed.

A posted receive belongs to the library until it completes or its cancellation has run, so nothing here cancels one:
closing the endpoint does, and a window on granted blocks stays open until then. Rendezvous is by get, because a
cancelled put may still write.
"""

import asyncio
import importlib
import importlib.util
import logging
import os
import struct
import threading
from collections.abc import Coroutine
from functools import partial
from typing import Any

from core.errors import TransferFailed
from kv_transfer.base import TransferOptions
from kv_transfer.channel import Channel, Sink
from kv_transfer.messages import MAX_MESSAGE_BYTES, Message, decode, encode
from kv_transfer.receiving import GrantTable
from kv_transfer.sending import LinkSender
from kv_transfer.serving import SessionReceiver
from kv_transfer.tcp import join_address, split_address

logger = logging.getLogger(__name__)
SCHEME = "ucx"
_LIBRARIES = ("ucxx", "ucp")
_MAGIC = b"TKV1"
_PREFIX = struct.Struct("<4sI")
_OPTIONS = {"RNDV_SCHEME": "get_zcopy"}


def find_library() -> str | None:
    """The name of the installed binding, without importing it."""
    return next((name for name in _LIBRARIES if importlib.util.find_spec(name) is not None), None)


class UcxContext:
    """The library keeps one context in a process, bound to the event loop that first uses it. It lives as long as
    that loop, not as long as its users: the library leaks descriptors and a thread at each start."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch: asyncio.Task[None] | None = None

    async def library(self) -> Any:
        """Ready for use. Raises RuntimeError when another event loop of this process is using it."""
        name = find_library()
        assert name is not None, "ucx is not available"
        os.environ.setdefault(
            "UCX_WARN_UNUSED_ENV_VARS", "n"
        )  # it warns of variables that the binding itself sets
        library = await asyncio.to_thread(importlib.import_module, name)
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise RuntimeError("UCX is in use on another event loop of this process")
        if self._loop is None:
            _initialise(library)
            self._loop = loop
            self._watch = loop.create_task(self._shut_down_at_the_end(library, loop))
        return library

    async def _shut_down_at_the_end(self, library: Any, loop: asyncio.AbstractEventLoop) -> None:
        """An event loop that ends cancels its tasks. The library's own thread would keep the process otherwise."""
        try:
            await loop.create_future()
        finally:
            self._loop = self._watch = None
            _shut_down(library)


_context = UcxContext()


def _initialise(library: Any) -> None:
    if library.__name__ == "ucxx":  # completions wake the event loop; the default would spin on it
        library.init(_OPTIONS, env_takes_precedence=True, progress_mode="thread", enable_python_future=True)
    else:
        library.init(_OPTIONS, env_takes_precedence=True, blocking_progress_mode=True)


def _shut_down(library: Any) -> None:
    if library.__name__ == "ucxx":
        library.core._get_ctx().worker.stop_request_notifier_thread()  # else its thread sleeps out a second
    try:
        library.reset()
    except library.exceptions.UCXError as error:
        logger.warning("UCX was not shut down cleanly: %s", error)


class UcxChannel(Channel):
    """Owns the endpoint."""

    def __init__(self, library: Any, endpoint: Any) -> None:
        super().__init__()
        self._error: type[Exception] = library.exceptions.UCXError
        self._endpoint = endpoint
        self._is_peer_gone = threading.Event()
        self._operations: set[asyncio.Task[None]] = set()
        endpoint.set_close_callback(
            self._is_peer_gone.set
        )  # no method of ours: the library would keep us alive

    async def receive(self) -> Message:
        prefix = bytearray(_PREFIX.size)
        await self._complete(self._endpoint.recv(prefix))
        magic, num_bytes = _PREFIX.unpack(prefix)
        if magic != _MAGIC or num_bytes > MAX_MESSAGE_BYTES:
            raise TransferFailed("malformed frame")
        message = bytearray(num_bytes)
        await self._complete(self._endpoint.recv(message))
        return decode(message)

    async def receive_payload(self, sink: Sink) -> None:
        with sink.window() as memory:
            await self._complete(self._endpoint.recv(memory[:]))

    async def wait_closed(self) -> None:
        """When no operation of the library is left, too."""
        await super().wait_closed()
        if self._operations:
            await asyncio.wait(self._operations)

    async def _send(self, message: Message, payload: memoryview | None) -> None:
        encoded = encode(message)
        await self._complete(self._endpoint.send(_PREFIX.pack(_MAGIC, len(encoded))))
        await self._complete(self._endpoint.send(encoded))
        if payload is not None:
            await self._complete(self._endpoint.send(payload[:]))
        if self._is_peer_gone.is_set():  # the library calls a send that the peer's death cancelled a success
            raise TransferFailed("the peer is gone")

    async def _complete(self, operation: Coroutine[Any, Any, Any]) -> None:
        """If the calling task is cancelled the operation goes on until the endpoint is closed."""
        if self._is_closing:
            operation.close()
            self._check_open()
        task = asyncio.get_running_loop().create_task(self._run(operation))
        self._operations.add(task)
        task.add_done_callback(self._completed)
        await asyncio.shield(task)

    async def _run(self, operation: Coroutine[Any, Any, Any]) -> None:
        """Maps errors, letting go of the library's traceback: it refers to memory of the pool."""
        if self._is_closing:
            operation.close()
            self._check_open()
        failure: str | None = None
        try:
            await operation
        except self._error as error:
            failure = str(error)
            error.__traceback__ = error.__context__ = None
        if failure is not None:
            raise TransferFailed(f"connection lost: {failure}")

    def _completed(self, task: asyncio.Task[None]) -> None:
        self._operations.discard(task)
        if not task.cancelled():
            task.exception()

    def _interrupt(self) -> None:
        """Nothing wakes before its operation has ended, which closing the endpoint brings about."""

    def _close_transport(self) -> None:
        self._endpoint.abort()


class UcxReceiver(SessionReceiver):
    """Listens on every interface: the library offers no choice. `options.bind_host` is only advertised."""

    def __init__(self, table: GrantTable, options: TransferOptions) -> None:
        super().__init__(table)
        self._options = options
        self._listener: Any = None
        self._address = ""

    @property
    def address(self) -> str:
        assert self._address, "not started"
        return self._address

    async def start(self) -> None:
        library = await _context.library()
        try:
            self._listener = library.create_listener(partial(self._accept, library), self._options.ucx_port)
        except library.exceptions.UCXError as error:
            raise OSError(f"cannot listen on UCX port {self._options.ucx_port}: {error}") from error
        host = self._options.advertised_host or self._options.bind_host
        self._address = join_address(SCHEME, host, self._listener.port)

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        await self._end_sessions()

    def _accept(self, library: Any, endpoint: Any) -> None:
        self._serve(UcxChannel(library, endpoint))


class UcxSender(LinkSender):
    async def _connect(self, address: str) -> Channel:
        host, port = split_address(address)
        library = await _context.library()
        failure: str | None = None
        try:
            return UcxChannel(library, await library.create_endpoint(host, port))
        except (library.exceptions.UCXError, OSError) as error:
            failure = str(error)
        raise TransferFailed(f"cannot connect to {address}: {failure}")
