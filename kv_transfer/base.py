"""The two narrow roles of moving KV blocks between pools. Knows nothing of engines, gRPC, Redis or requests.

    prefill worker                                decode worker
    KVSender.open(grant) ──► KVTransfer           KVReceiver.expect(grant)
        send(runs) ... send(runs)      ═════►         blocks land in the granted blocks, nowhere else
        seal(seal)                     ─────►         wait_sealed(id) ──► verified Seal
        cancel() ─► quiet?                            cancel(id) ─► quiet?

Everything is asynchronous and runs in the service's process, never on the engine's thread; copies and digests run
in worker threads. Errors are `core.errors` types: TransferFailed for anything the peer or the wire did wrong.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from core.grant import Grant, Seal
from core.ids import BlockId, HandoffId


@dataclass(frozen=True, slots=True)
class Run:
    """`num_blocks` adjacent blocks of the sender's pool from `source_block` on; they fill the grant's blocks at
    `position`, `position + 1`, ... (which need not be adjacent in the receiver's pool)."""

    source_block: BlockId
    position: int
    num_blocks: int


class KVTransfer(ABC):
    """The sender's side of one handoff. One task at a time calls it; cancel() may be called at any moment."""

    @property
    @abstractmethod
    def num_bytes_sent(self) -> int:
        """KV bytes handed to the wire or copied so far, without framing."""

    @abstractmethod
    async def send(self, runs: Sequence[Run]) -> None:
        """Returns once the source blocks may change again and each run's digest is recorded. Raises TransferFailed."""

    @abstractmethod
    async def seal(self, seal: Seal) -> Seal:
        """Complete `seal` with the digests of every run sent, send it last, return it. The transfer is over.
        Raises TransferFailed."""

    @abstractmethod
    async def cancel(self) -> bool:
        """Stop sending. True once nothing of this handoff will read or write any pool any more. Idempotent."""


class KVSender(ABC):
    """Opens transfers to any receiver of its scheme; pools connections by address. Owns nothing of the region."""

    @abstractmethod
    async def open(self, grant: Grant, address: str) -> KVTransfer:
        """Connect (or reuse a connection) to `address`, one of `grant.addresses`. Raises TransferFailed at once when
        the peer is unreachable, refuses the grant, or has another KVSpec (both values named)."""

    @abstractmethod
    async def close(self) -> None:
        """Cancel what is open and drop the connections."""


class KVReceiver(ABC):
    """Receives into one region. Enforces that only blocks of a live grant are written."""

    @property
    @abstractmethod
    def address(self) -> str:
        """`scheme://...` as senders reach it; valid after start()."""

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    def expect(self, grant: Grant) -> None:
        """Accept a transfer for this grant from now on; the blocks belong to the transfer until sealed or quiet."""

    @abstractmethod
    async def wait_sealed(self, handoff_id: HandoffId, timeout_s: float) -> Seal:
        """The seal, after every run it lists has completed, tiles the grant and matches its digest. Raises
        TransferFailed (bad digest, peer lost, malformed) or DeadlineExceeded; the caller then cancels."""

    @abstractmethod
    async def cancel(self, handoff_id: HandoffId) -> bool:
        """Forget the grant; later frames for it are discarded. True once no write into its blocks can happen any
        more; False when a writer could not be shown quiet yet (the caller quarantines and asks again). Idempotent."""

    @abstractmethod
    async def close(self) -> None: ...
