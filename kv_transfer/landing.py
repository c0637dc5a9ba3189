"""One granted handoff on the receiving side: which bytes may be written, what arrived, whether memory is quiet.
Knows nothing of connections, nor of other handoffs.

    EXPECTED ─► RECEIVING ─► SEALED
        │           ├──────► FAILED        (bad or lost peer; the owner then cancels)
        └───────────┴──────► CANCELLED
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum

from core.errors import Cancelled, TandemError, TransferFailed
from core.grant import Grant, RunDigest, Seal
from core.ids import BlockHash
from core.kv_region import KVRegion
from kernels.digest import digest
from kv_transfer.base import Identity
from kv_transfer.messages import runs_digest

Scratch = Callable[[int], memoryview]


class LandingState(StrEnum):
    EXPECTED = "expected"
    RECEIVING = "receiving"
    SEALED = "sealed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Landing:
    """One granted handoff on the receiving side. The table makes it, one session at most writes into it.

    It is *quiet* when it is no longer RECEIVING and nobody can write into its blocks: no window is open and, where
    the sender writes, the sender has said so or is gone."""

    def __init__(self, grant: Grant, region: KVRegion, chain_hash: BlockHash | None) -> None:
        self.grant = grant
        self.state = LandingState.EXPECTED
        self.peer: Identity | None = None
        self._region = region
        self._chain_hash = chain_hash
        self._runs: list[RunDigest] = []
        self._seal: Seal | None = None
        self._error: TandemError | None = None
        self._settled = asyncio.Event()
        self._quiet = asyncio.Event()
        self._num_windows = 0
        self._is_written_by_peer = False
        self._ask_to_stop: Callable[[], None] | None = None

    def attach(self, peer: Identity, ask_to_stop: Callable[[], None], is_written_by_peer: bool) -> None:
        """A session begins to write. It calls `detach` once, when its peer will write no more."""
        assert self.state is LandingState.EXPECTED, self.state
        self.state = LandingState.RECEIVING
        self.peer, self._ask_to_stop, self._is_written_by_peer = peer, ask_to_stop, is_written_by_peer

    def fail(self, reason: str) -> None:
        """The transfer cannot succeed any more. Nothing changes for one that is sealed or over."""
        if self.state is LandingState.RECEIVING:
            self.state = LandingState.FAILED
            self._error = TransferFailed(f"{self.grant.handoff_id}: {reason}")
            self._settled.set()

    def detach(self, reason: str) -> None:
        """The peer writes no more: it gave up, or is gone."""
        self.fail(reason)
        self._is_written_by_peer = False
        self._note_quiet()

    def arrive(self, run: RunDigest) -> None:
        """The bytes of `run` are in place."""
        if self.state is LandingState.RECEIVING:
            self._runs.append(run)

    def seal(self, seal: Seal, runs: bytes) -> None:
        """The last message of the peer. What arrived becomes the seal's list of runs, if `runs` attests it."""
        self._is_written_by_peer = False
        if self.state is LandingState.RECEIVING:
            if runs_digest(tuple(self._runs)) != runs:
                self.fail("the seal lists other runs than arrived")
            else:
                self.state = LandingState.SEALED
                self._seal = replace(seal, runs=tuple(self._runs))
                self._settled.set()
        self._note_quiet()

    def cancel(self) -> None:
        """No byte of it is written from now on by this process; the peer is asked to stop."""
        was_receiving = self.state is LandingState.RECEIVING
        self.state = LandingState.CANCELLED
        self._error = Cancelled(f"{self.grant.handoff_id} was cancelled")
        self._settled.set()
        self._note_quiet()
        if was_receiving and self._ask_to_stop is not None:
            self._ask_to_stop()

    @contextmanager
    def window(self, run: RunDigest, scratch: Scratch) -> Iterator[memoryview]:
        """The blocks of `run`, or scratch once they must not be written any more."""
        if self.state is not LandingState.RECEIVING:
            yield scratch(self.num_bytes(run))
            return
        self._num_windows += 1
        try:
            with self._region.view(self.grant.block_ids[run.position], run.num_blocks) as memory:
                yield memory
        finally:
            self._num_windows -= 1
            self._note_quiet()

    def num_bytes(self, run: RunDigest) -> int:
        return run.num_blocks * self._region.block_bytes

    def check_run(self, run: RunDigest) -> None:
        """Raises TransferFailed unless `run` names blocks of this grant that are adjacent in the pool."""
        last = run.position + run.num_blocks
        if not (0 <= run.position < last <= len(self.grant.block_ids)):
            raise TransferFailed(
                f"{self.grant.handoff_id}: run [{run.position}, {last}) is outside the grant"
            )
        blocks = self.grant.block_ids[run.position : last]
        if blocks != tuple(range(blocks[0], blocks[0] + run.num_blocks)):
            raise TransferFailed(
                f"{self.grant.handoff_id}: run [{run.position}, {last}) is not adjacent here"
            )

    async def settled(self) -> Seal:
        """The seal as the peer gave it. Raises what ended the transfer instead."""
        await self._settled.wait()
        if self._error is not None:
            raise self._error
        assert self._seal is not None
        return self._seal

    async def wait_quiet(self) -> None:
        await self._quiet.wait()

    def check_seal(self, seal: Seal) -> None:
        """Raises TransferFailed naming the first thing in which seal and grant disagree. Reads no blocks."""
        grant, peer = self.grant, self.peer
        assert peer is not None
        expected = [
            ("handoff", seal.handoff_id, grant.handoff_id),
            ("decode epoch", seal.decode_epoch, grant.epoch),
            ("prefill worker", seal.prefill_worker_id, peer.worker_id),
            ("prefill epoch", seal.prefill_epoch, peer.epoch),
            ("number of tokens", seal.num_tokens, grant.num_prompt_tokens),
        ]
        if self._chain_hash is not None:
            expected.append(("chain hash", seal.chain_hash, self._chain_hash))
        for name, sealed, granted in expected:
            if sealed != granted:
                raise TransferFailed(f"{grant.handoff_id}: {name} {sealed!r} sealed, {granted!r} granted")
        if not seal.covers(len(grant.block_ids)):
            runs = [(run.position, run.num_blocks) for run in seal.runs]
            raise TransferFailed(f"{grant.handoff_id}: runs {runs} do not tile {len(grant.block_ids)} blocks")

    def check_digests(self, seal: Seal) -> None:
        """Raises TransferFailed for the first run whose bytes are not what was sent. For a worker thread."""
        for run in seal.runs:
            with self._region.view(self.grant.block_ids[run.position], run.num_blocks) as memory:
                if digest(memory) != run.digest:
                    raise TransferFailed(f"{self.grant.handoff_id}: bad digest of run at {run.position}")

    def _note_quiet(self) -> None:
        is_over = self.state not in (LandingState.EXPECTED, LandingState.RECEIVING)
        if is_over and not self._num_windows and not self._is_written_by_peer:
            self._quiet.set()


@dataclass(frozen=True, slots=True)
class LandingSink:
    """The `channel.Sink` of one run of a landing."""

    landing: Landing
    run: RunDigest
    scratch: Scratch

    @property
    def num_bytes(self) -> int:
        return self.landing.num_bytes(self.run)

    def window(self) -> AbstractContextManager[memoryview]:
        return self.landing.window(self.run, self.scratch)
