"""The sending end: connections pooled by address, and the transfers on them. The same for every connector."""

import asyncio
import itertools
import logging
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from core.errors import Cancelled, StaleEpoch, TandemError, TransferFailed, error_from
from core.grant import Grant, RunDigest, Seal
from core.ids import BlockId
from core.kv_region import KVRegion
from core.logs import about_handoff
from kernels.digest import digest
from kv_transfer.base import Identity, KVSender, KVTransfer, Run, Tap, TransferOptions
from kv_transfer.channel import Channel
from kv_transfer.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Data,
    Hello,
    Message,
    Open,
    Quiet,
    Refused,
    Stop,
    Trailer,
    Welcome,
    grant_digest,
    runs_digest,
)

logger = logging.getLogger(__name__)


class Piece(NamedTuple):
    """Blocks that are adjacent in both pools: what is copied, digested and framed as one.

    source pool        [ . . s s+1 s+2 . . ]
    grant                p   p+1 p+2                 positions
    destination pool   [ . d d+1 d+2 . . . ]
    """

    source: BlockId
    position: int
    destination: BlockId
    num_blocks: int


def split(runs: Sequence[Run], block_ids: Sequence[BlockId], max_blocks: int) -> Iterator[Piece]:
    """Each run as its largest pieces of at most `max_blocks`."""
    for run in runs:
        position, end = run.position, run.position + run.num_blocks
        assert 0 <= position < end <= len(block_ids), (run, len(block_ids))
        while position < end:
            first, limit = position, min(end, position + max_blocks)
            position += 1
            while position < limit and block_ids[position] == block_ids[first] + position - first:
                position += 1
            source = BlockId(run.source_block + first - run.position)
            yield Piece(source, first, block_ids[first], position - first)


def batches(pieces: Iterator[Piece], max_blocks: int) -> Iterator[list[Piece]]:
    """Pieces together until they hold `max_blocks`: scattered blocks share one trip to a worker thread."""
    batch: list[Piece] = []
    num_blocks = 0
    for piece in pieces:
        batch.append(piece)
        num_blocks += piece.num_blocks
        if num_blocks >= max_blocks:
            yield batch
            batch, num_blocks = [], 0
    if batch:
        yield batch


class LinkTransfer(KVTransfer):
    """One handoff on a link. Ends exactly once: sealed, given up, or failed with the link."""

    def __init__(self, link: "Link", number: int, grant: Grant) -> None:
        self._link = link
        self._number = number
        self._grant = grant
        self._runs: list[RunDigest] = []
        self._num_bytes_sent = 0
        self._error: TandemError | None = None
        self._answered = asyncio.Event()
        self._moving: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def num_bytes_sent(self) -> int:
        return self._num_bytes_sent

    async def send(self, runs: Sequence[Run]) -> None:
        max_blocks = self._link.piece_blocks
        for batch in batches(split(runs, self._grant.block_ids, max_blocks), max_blocks):
            await self._run(self._move(batch))

    async def seal(self, seal: Seal) -> Seal:
        runs = tuple(self._runs)
        trailer = Trailer(self._number, replace(seal, runs=()), runs_digest(runs))
        await self._run(self._link.channel.send(trailer))
        self._link.forget(self._number)
        self._error = TransferFailed(f"{self._grant.handoff_id} is already sealed")
        return replace(seal, runs=runs)

    async def cancel(self) -> bool:
        ending = self.give_up(Cancelled(f"{self._grant.handoff_id} was cancelled by the sender"))
        await asyncio.wait({ending}, timeout=self._link.options.grace_s)
        return self._moving is None or self._moving.done()

    async def accepted(self) -> None:
        """Returns when the receiver has accepted the grant. Raises its refusal."""
        await self._answered.wait()
        if self._error is not None:
            raise self._error

    def answer(self, error: TandemError | None) -> None:
        if error is not None:
            self.fail(error)
        self._answered.set()

    def fail(self, error: TandemError) -> None:
        """No further piece is begun. The one being moved may still be read until it has ended."""
        self._error = self._error or error
        self._answered.set()

    def give_up(self, error: TandemError) -> asyncio.Task[None]:
        """Stop, then tell the receiver. The task ends when both are done; it raises nothing."""
        self.fail(error)
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end())
        return self._ending

    async def idle(self) -> None:
        """Returns once no byte of the source is read any more."""
        if self._moving is not None:
            await asyncio.wait({self._moving})

    async def _end(self) -> None:
        await self.idle()
        if not self._link.forget(self._number):
            return
        try:
            await self._link.channel.send(Quiet(self._number))
        except TransferFailed as error:
            logger.info("the receiver is gone: %s", error, extra=about_handoff(self._grant.handoff_id))

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run one uninterruptible part: if the caller is cancelled it goes on, and `idle` waits for it."""
        if self._error is not None:
            work.close()
            raise self._error
        assert self._moving is None or self._moving.done(), "one task at a time sends"
        self._moving = asyncio.get_running_loop().create_task(work)
        self._moving.add_done_callback(_retrieve)
        await asyncio.shield(self._moving)

    async def _move(self, batch: list[Piece]) -> None:
        channel, region = self._link.channel, self._link.region
        with ExitStack() as views:
            sources = [views.enter_context(region.view(p.source, p.num_blocks)) for p in batch]
            moved = await channel.in_thread(partial(self._place, batch, sources))
            for piece, source, (run_digest, tapped) in zip(batch, sources, moved, strict=True):
                if self._error is not None:
                    raise self._error
                run = RunDigest(piece.position, piece.num_blocks, run_digest)
                await channel.send(Data(self._number, run), tapped if channel.carries_payload else None)
                self._runs.append(run)
                self._num_bytes_sent += len(source)

    def _place(self, batch: list[Piece], sources: list[memoryview]) -> list[tuple[bytes, memoryview]]:
        moved = []
        for piece, source in zip(batch, sources, strict=True):
            run_digest = digest(source)
            tapped = self._link.tap(source)
            self._link.channel.place(piece.destination, tapped)
            moved.append((run_digest, tapped))
        return moved


def _retrieve(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()


class Link:
    """One connection to a receiver that has welcomed us, and the transfers open on it."""

    def __init__(
        self,
        channel: Channel,
        peer: Identity,
        region: KVRegion,
        options: TransferOptions,
        tap: Tap,
        on_lost: Callable[[], None],
    ) -> None:
        self.channel = channel
        self.peer = peer
        self.region = region
        self.options = options
        self.tap = tap
        self.piece_blocks = max(1, options.piece_bytes // region.block_bytes)
        self._on_lost = on_lost
        self.is_lost = False
        self._numbers = itertools.count(1)
        self._transfers: dict[int, LinkTransfer] = {}
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def open(self, grant: Grant) -> LinkTransfer:
        self._check_peer(grant)
        number = next(self._numbers)
        transfer = self._transfers[number] = LinkTransfer(self, number, grant)
        request = Open(number, grant.handoff_id, grant.epoch, grant_digest(grant), grant.mac)
        try:
            async with asyncio.timeout(self.options.connect_timeout_s):
                await self.channel.send(request)
                await transfer.accepted()
        except TimeoutError as error:
            transfer.give_up(Cancelled("not answered"))
            raise TransferFailed(f"{self.peer.worker_id} does not answer") from error
        except BaseException:
            transfer.give_up(Cancelled("not accepted"))
            raise
        return transfer

    def forget(self, number: int) -> bool:
        """Whether the transfer was still open to the receiver."""
        return self._transfers.pop(number, None) is not None

    def lose(self, error: TandemError) -> None:
        """Fail every transfer and close the channel. Idempotent."""
        if self.is_lost:
            return
        self.is_lost = True
        self.channel.close()
        for transfer in self._transfers.values():
            transfer.fail(error)
        self._on_lost()

    async def close(self) -> None:
        transfers = list(self._transfers.values())
        self.lose(Cancelled("the sender was closed"))
        for transfer in transfers:
            await transfer.idle()
        await self._reader
        await self.channel.wait_closed()

    async def _read(self) -> None:
        try:
            while True:
                self._handle(await self.channel.receive())
        except TransferFailed as error:
            self.lose(TransferFailed(f"lost {self.peer.worker_id}: {error}"))

    def _handle(self, message: Message) -> None:
        """A transfer that is already over here may still be answered or stopped: that is no news."""
        if not isinstance(message, Accepted | Refused | Stop):
            raise TransferFailed(f"unexpected {type(message).__name__}")
        transfer = self._transfers.get(message.number)
        if transfer is None:
            return
        match message:
            case Accepted():
                transfer.answer(None)
            case Refused():
                self.forget(message.number)
                transfer.answer(error_from(message.code, message.reason))
            case Stop():
                transfer.give_up(Cancelled(f"cancelled by {self.peer.worker_id}"))

    def _check_peer(self, grant: Grant) -> None:
        peer = self.peer
        if (grant.worker_id, grant.epoch) != (peer.worker_id, peer.epoch):
            raise StaleEpoch(
                f"granted by {grant.worker_id} in epoch {grant.epoch}, "
                f"the address is that of {peer.worker_id} in epoch {peer.epoch}"
            )


class LinkSender(KVSender):
    """A sender whose connector makes connected channels."""

    def __init__(self, region: KVRegion, identity: Identity, options: TransferOptions, tap: Tap) -> None:
        self._region = region
        self._identity = identity
        self._options = options
        self._tap = tap
        self._links: dict[str, asyncio.Future[Link]] = {}

    @abstractmethod
    async def _connect(self, address: str) -> Channel:
        """Raises TransferFailed when nobody answers there."""

    async def open(self, grant: Grant, address: str) -> LinkTransfer:
        meeting = self._links.get(address)
        if meeting is None:
            meeting = asyncio.get_running_loop().create_task(self._meet(address))
            meeting.add_done_callback(partial(self._met, address))
            self._links[address] = meeting
        link = await asyncio.shield(meeting)
        if link.peer.epoch != grant.epoch:
            link = await self._renewed(address, link)
        return await link.open(grant)

    async def _renewed(self, address: str, link: "Link") -> "Link":
        """Greet a receiver again that may have taken a new epoch since: that ends the connection of its old one. If
        it has not, the grant is stale and the connection stays as it is."""
        fresh = await self._meet(address)
        other = _result_of(self._links.get(address))
        if other is not None and other is not link:  # another transfer was faster
            await fresh.close()
            return other
        if fresh.peer.epoch == link.peer.epoch and not link.is_lost:
            await fresh.close()
            return link
        link.lose(StaleEpoch(f"{link.peer.worker_id} has taken a new epoch"))
        renewed: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
        renewed.set_result(fresh)
        self._links[address] = renewed
        return fresh

    async def close(self) -> None:
        meetings = list(self._links.values())
        for meeting in meetings:
            if not meeting.done():
                meeting.cancel()
        for link in await asyncio.gather(*meetings, return_exceptions=True):
            if isinstance(link, Link):
                await link.close()

    async def _meet(self, address: str) -> Link:
        try:
            async with asyncio.timeout(self._options.connect_timeout_s):
                channel = await self._connect(address)
                try:
                    peer = await self._greet(channel)
                except BaseException:
                    channel.close()
                    raise
        except TimeoutError as error:
            raise TransferFailed(f"no answer from {address}") from error
        return Link(channel, peer, self._region, self._options, self._tap, partial(self._drop, address))

    async def _greet(self, channel: Channel) -> Identity:
        await channel.send(Hello(PROTOCOL_VERSION, self._identity))
        answer = await channel.receive()
        if isinstance(answer, Refused):
            raise error_from(answer.code, answer.reason)
        if not isinstance(answer, Welcome):
            raise TransferFailed(f"unexpected {type(answer).__name__}")
        mismatch = self._identity.spec.mismatch(answer.identity.spec)
        if mismatch is not None:
            raise TransferFailed(f"cannot send to {answer.identity.worker_id}: {mismatch}")
        channel.welcomed(answer)
        return answer.identity

    def _met(self, address: str, meeting: "asyncio.Future[Link]") -> None:
        if meeting.cancelled() or meeting.exception() is not None:
            self._drop(address)

    def _drop(self, address: str) -> None:
        """The connection to that address is gone, unless another has taken its place."""
        link = _result_of(self._links.get(address))
        if link is None or link.is_lost:
            self._links.pop(address, None)


def _result_of(meeting: "asyncio.Future[Link] | None") -> Link | None:
    """None while nobody has been met, or when that failed."""
    if meeting is None or not meeting.done() or meeting.cancelled() or meeting.exception() is not None:
        return None
    return meeting.result()
