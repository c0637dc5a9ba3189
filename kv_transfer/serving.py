"""The receiving end of connections: greets peers and lets admitted transfers write. The same for every connector."""

import asyncio
import logging
from functools import partial

from core.errors import ErrorCode, TandemError, TransferFailed
from core.kv_spec import KVSpec
from kv_transfer.base import Identity, KVReceiver
from kv_transfer.channel import Channel
from kv_transfer.landing import Landing, LandingSink
from kv_transfer.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Data,
    Hello,
    Message,
    Open,
    Quiet,
    Stop,
    Trailer,
    Welcome,
    refusal,
)
from kv_transfer.receiving import GrantTable

logger = logging.getLogger(__name__)
_GREETING_TIMEOUT_S = 10.0


class Session:
    """One connected sender. Its messages are handled in order by one task; it ends with the connection."""

    def __init__(self, channel: Channel, table: GrantTable) -> None:
        self._channel = channel
        self._table = table
        self._landings: dict[int, Landing] = {}
        self._stopping: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        reason = "receiver closed"
        try:
            peer = await self._greet()
            while True:
                await self._handle(await self._channel.receive(), peer)
        except TransferFailed as error:
            reason = str(error)
        finally:
            await self._end(f"lost the sender: {reason}")

    async def _end(self, reason: str) -> None:
        """Transfers fail at once; their blocks are quiet when the peer can write no more."""
        logger.info("transfer connection ended: %s", reason)
        for landing in self._landings.values():
            landing.fail(reason)
        await self._channel.drain()
        for landing in self._landings.values():
            landing.detach(reason)
        self._channel.close()

    async def _greet(self) -> Identity:
        try:
            async with asyncio.timeout(_GREETING_TIMEOUT_S):
                hello = await self._channel.receive()
        except TimeoutError as error:
            raise TransferFailed("no greeting") from error
        if not isinstance(hello, Hello):
            raise TransferFailed(f"{type(hello).__name__} before Hello")
        mismatch = find_mismatch(self._table.identity.spec, hello)
        if mismatch is not None:
            await self._channel.send(refusal(0, ErrorCode.TRANSFER, f"refused by the receiver: {mismatch}"))
            raise TransferFailed(mismatch)
        welcome = Welcome(self._table.identity, self._table.region.num_blocks)
        await self._channel.welcome(welcome, self._table.region)
        return hello.identity

    async def _handle(self, message: Message, peer: Identity) -> None:
        match message:
            case Open():
                await self._open(message, peer)
            case Data():
                await self._receive(message)
            case Trailer():
                self._take(message.number).seal(message.seal, message.runs)
            case Quiet():
                self._give_up(message.number)
            case _:
                raise TransferFailed(f"unexpected {type(message).__name__}")

    async def _open(self, request: Open, peer: Identity) -> None:
        if request.number in self._landings:
            raise TransferFailed(f"transfer {request.number} opened twice")
        try:
            landing = self._table.admit(request)
        except TandemError as error:
            await self._channel.send(refusal(request.number, error.code, str(error)))
            return
        self._landings[request.number] = landing
        landing.attach(peer, partial(self._stop, request.number), not self._channel.carries_payload)
        await self._channel.send(Accepted(request.number))

    async def _receive(self, message: Data) -> None:
        landing = self._landings.get(message.number)
        if landing is None:
            raise TransferFailed(f"data for transfer {message.number}, which is not open")
        landing.check_run(message.run)
        await self._channel.receive_payload(LandingSink(landing, message.run, self._table.scratch))
        landing.arrive(message.run)

    def _give_up(self, number: int) -> None:
        landing = self._landings.pop(number, None)
        if landing is not None:  # None: it was given up before our refusal arrived
            landing.detach("given up by the sender")

    def _take(self, number: int) -> Landing:
        landing = self._landings.pop(number, None)
        if landing is None:
            raise TransferFailed(f"end of transfer {number}, which is not open")
        return landing

    def _stop(self, number: int) -> None:
        task = asyncio.get_running_loop().create_task(self._send_stop(number))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    async def _send_stop(self, number: int) -> None:
        try:
            await self._channel.send(Stop(number))
        except TransferFailed as error:
            logger.info("transfer %d needs no stop: %s", number, error)


class SessionReceiver(KVReceiver):
    """A receiver whose connector hands it connected channels."""

    def __init__(self, table: GrantTable) -> None:
        self._table = table
        self._sessions: dict[asyncio.Task[None], Channel] = {}

    def _serve(self, channel: Channel) -> None:
        task = asyncio.get_running_loop().create_task(Session(channel, self._table).run())
        self._sessions[task] = channel
        task.add_done_callback(lambda done: self._sessions.pop(done))

    async def _end_sessions(self) -> None:
        sessions = dict(self._sessions)
        for channel in sessions.values():
            channel.close()
        for task, channel in sessions.items():
            await task
            await channel.wait_closed()


def find_mismatch(spec: KVSpec, hello: Hello | Welcome) -> str | None:
    """Why blocks cannot be exchanged, with both values named; None when they can."""
    if isinstance(hello, Hello) and hello.protocol != PROTOCOL_VERSION:
        return f"protocol: {PROTOCOL_VERSION} here, {hello.protocol} there"
    return spec.mismatch(hello.identity.spec)
