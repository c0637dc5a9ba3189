"""The connector within one process: what unit tests use. The same messages, checks and windows as on a wire.

Both ends are given the same LoopbackNetwork; an address means something on that network only.
"""

import asyncio
import itertools
from collections.abc import Callable
from typing import NamedTuple

from core.errors import TransferFailed
from core.kv_region import KVRegion
from kv_transfer.base import Identity, Tap, TransferOptions
from kv_transfer.channel import Channel, Sink
from kv_transfer.messages import Message, decode, encode
from kv_transfer.receiving import GrantTable
from kv_transfer.sending import LinkSender
from kv_transfer.serving import SessionReceiver

SCHEME = "loopback"


class _Parcel(NamedTuple):
    message: bytes
    payload: memoryview | None
    taken: asyncio.Future[None]


class LoopbackChannel(Channel):
    """One end of a pair. A payload is copied by its receiver while its sender waits."""

    def __init__(self) -> None:
        super().__init__()
        self._inbox: asyncio.Queue[_Parcel | None] = asyncio.Queue()
        self._untaken: set[asyncio.Future[None]] = set()
        self._received: _Parcel | None = None
        self._peer: LoopbackChannel | None = None

    @classmethod
    def pair(cls) -> "tuple[LoopbackChannel, LoopbackChannel]":
        here, there = cls(), cls()
        here._peer, there._peer = there, here
        return here, there

    async def receive(self) -> Message:
        parcel = await self._inbox.get()
        if parcel is None:
            raise TransferFailed("connection closed")
        self._received = parcel
        if parcel.payload is None:
            _settle(parcel.taken)
        return decode(parcel.message)

    async def receive_payload(self, sink: Sink) -> None:
        assert self._received is not None
        payload = self._received.payload
        if payload is None or len(payload) != sink.num_bytes:
            raise TransferFailed(f"payload is not of {sink.num_bytes} bytes")
        with sink.window() as memory:
            memory[:] = payload
        _settle(self._received.taken)

    async def _send(self, message: Message, payload: memoryview | None) -> None:
        assert self._peer is not None
        if self._peer._is_closing:
            raise TransferFailed("connection closed by the peer")
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._untaken.add(taken)
        self._peer._inbox.put_nowait(_Parcel(encode(message), payload, taken))
        try:
            await taken
        finally:
            self._untaken.discard(taken)

    def _interrupt(self) -> None:
        assert self._peer is not None
        for end in (self, self._peer):
            end._inbox.put_nowait(None)
            for taken in end._untaken:
                if not taken.done():
                    taken.set_exception(TransferFailed("connection closed"))

    def _close_transport(self) -> None:
        return


def _settle(taken: asyncio.Future[None]) -> None:
    if not taken.done():
        taken.set_result(None)


class LoopbackNetwork:
    """Who listens where."""

    def __init__(self) -> None:
        self._accept: dict[str, Callable[[LoopbackChannel], None]] = {}
        self._numbers = itertools.count(1)

    def listen(self, accept: Callable[[LoopbackChannel], None]) -> str:
        """The address at which `accept` gets connected channels."""
        address = f"{SCHEME}://{next(self._numbers)}"
        self._accept[address] = accept
        return address

    def unlisten(self, address: str) -> None:
        self._accept.pop(address, None)

    def connect(self, address: str) -> LoopbackChannel:
        accept = self._accept.get(address)
        if accept is None:
            raise TransferFailed(f"nobody listens at {address}")
        here, there = LoopbackChannel.pair()
        accept(there)
        return here


class LoopbackReceiver(SessionReceiver):
    def __init__(self, table: GrantTable, network: LoopbackNetwork) -> None:
        super().__init__(table)
        self._network = network
        self._address = ""

    @property
    def address(self) -> str:
        assert self._address, "not started"
        return self._address

    async def start(self) -> None:
        self._address = self._network.listen(self._serve)

    async def close(self) -> None:
        self._network.unlisten(self._address)
        await self._end_sessions()


class LoopbackSender(LinkSender):
    def __init__(
        self,
        region: KVRegion,
        identity: Identity,
        options: TransferOptions,
        tap: Tap,
        network: LoopbackNetwork,
    ) -> None:
        super().__init__(region, identity, options, tap)
        self._network = network

    async def _connect(self, address: str) -> Channel:
        return self._network.connect(address)
