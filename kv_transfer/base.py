"""The two narrow roles of moving KV blocks between pools. Knows nothing of engines, gRPC, Redis or requests.

    prefill worker                                decode worker
    KVSender.open(grant) ──► KVTransfer           ReceiverSet.expect(grant)
        send(runs) ... send(runs)      ═════►         blocks land in the granted blocks, nowhere else
        seal(seal)                     ─────►         wait_sealed(id) ──► verified Seal
        cancel() ─► quiet?                            cancel(id) ─► quiet?

Everything is asynchronous and runs in the service's process, never on the engine's thread; copies and digests run
in worker threads. Errors are `core.errors` types: TransferFailed for anything the peer or the wire did wrong.

A worker listens on several connectors, so what is granted is kept once (`connectors.ReceiverSet`) and a KVReceiver
only listens.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from core.grant import Grant, Seal
from core.ids import BlockId, Epoch, WorkerId
from core.kv_spec import KVSpec

Tap = Callable[[memoryview], memoryview]
"""Sees a run's source bytes after they were digested and returns the bytes to be moved. See `faults`."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a worker is to its peers, exchanged when two of them meet."""

    worker_id: WorkerId
    epoch: Epoch
    spec: KVSpec


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """Hosts, ports and bounds of the connectors. Port 0 picks a free one; `advertised_host` is the name that peers
    use (the bound one unless given). A run is moved in pieces of about `piece_bytes`; after cancel the peer has
    `grace_s` to answer before the caller is told "not quiet yet"."""

    bind_host: str = "127.0.0.1"
    advertised_host: str | None = None
    tcp_port: int = 0
    ucx_port: int = 0
    piece_bytes: int = 4 << 20
    connect_timeout_s: float = 5.0
    grace_s: float = 0.5


@dataclass(frozen=True, slots=True)
class Run:
    """`num_blocks` adjacent blocks of the sender's pool from `source_block` on; they fill the grant's blocks at
    `position`, `position + 1`, ... (which need not be adjacent in the receiver's pool)."""

    source_block: BlockId
    position: int
    num_blocks: int


def runs_of(block_ids: Sequence[BlockId], position: int = 0) -> Iterator[Run]:
    """The sender's blocks `block_ids`, which fill the grant's from `position` on: adjacent ones together."""
    start = 0
    for index in range(1, len(block_ids) + 1):
        if index == len(block_ids) or block_ids[index] != block_ids[index - 1] + 1:
            yield Run(block_ids[start], position + start, index - start)
            start = index


class KVTransfer(ABC):
    """The sender's side of one handoff. One task at a time calls it; cancel() may be called at any moment."""

    @property
    @abstractmethod
    def num_bytes_sent(self) -> int:
        """KV bytes handed to the wire or copied so far, without framing."""

    @abstractmethod
    async def send(self, runs: Sequence[Run]) -> None:
        """Returns once the source blocks may change again and each run's digest is recorded. Raises TransferFailed
        (peer lost) or Cancelled (by either side); after an error or a cancelled call the source blocks may still be
        read until cancel() has answered True."""

    @abstractmethod
    async def seal(self, seal: Seal) -> Seal:
        """Complete `seal` with the digests of every run sent, send it last, return it. The transfer is over.
        Raises TransferFailed or Cancelled."""

    @abstractmethod
    async def cancel(self) -> bool:
        """Stop sending. True once nothing of this handoff will read or write any pool any more. Idempotent."""


class KVSender(ABC):
    """Opens transfers to any receiver of its scheme; pools connections by address. Owns nothing of the region."""

    @abstractmethod
    async def open(self, grant: Grant, address: str) -> KVTransfer:
        """Connect (or reuse a connection) to `address`, one of `grant.addresses`. Raises TransferFailed at once when
        the peer is unreachable, refuses the grant, or has another KVSpec (both values named); StaleEpoch when the
        grant is of another incarnation or is over."""

    @abstractmethod
    async def close(self) -> None:
        """Cancel what is open and drop the connections. Nothing reads the region afterwards."""


class KVReceiver(ABC):
    """Listens on one connector and receives into one region, only into blocks of a live grant."""

    @property
    @abstractmethod
    def address(self) -> str:
        """`scheme://...` as senders reach it; valid after start()."""

    @abstractmethod
    async def start(self) -> None:
        """Raises OSError when the address cannot be bound."""

    @abstractmethod
    async def close(self) -> None:
        """Stop listening and drop the connections; transfers in progress fail. Nothing is written by this process
        afterwards."""
