"""A sender that fails on purpose, for tests and chaos runs. Wraps any connector; knows nothing of which.

Corruption is of the bytes on their way: a run is digested, then a copy with one bit flipped is what is moved. The
receiver must find it. Disorder is of a transfer's blocks, each of which becomes a run of its own:

    as it should be   0 1 2 3, seal
    reorders          3 2 1 0, seal
    duplicates        0 1 2 3 3, seal
    drops_run         0 1 2, seal
    seal_first        0 1 2, seal, 3
"""

import asyncio
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from core.errors import TransferFailed
from core.grant import Grant, Seal
from core.ids import BlockId
from core.kv_region import KVRegion
from kv_transfer.base import Identity, KVSender, KVTransfer, Run, TransferOptions
from kv_transfer.connectors import SenderSet, create_senders
from kv_transfer.loopback import LoopbackNetwork


class Stage(StrEnum):
    OPEN = "open"
    SEND = "send"
    SEAL = "seal"


@dataclass(frozen=True, slots=True)
class Faults:
    """What befalls every `every`-th transfer, from the first on: one corrupted run, a stage that raises
    TransferFailed, a seal that is lost, blocks in another order (harmless), one of them twice, never or after the
    seal, a delay before each stage."""

    corrupts: bool = False
    fails_at: Stage | None = None
    drops_seal: bool = False
    reorders: bool = False
    duplicates: bool = False
    drops_run: bool = False
    seal_first: bool = False
    delay_s: float = 0.0
    every: int = 1

    @property
    def are_of_order(self) -> bool:
        return self.reorders or self.duplicates or self.drops_run or self.seal_first


_NONE = Faults()


class Corruption:
    """A `base.Tap`: flips a bit of the next run for each time it was asked to. Called from worker threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_due = 0

    def ask(self) -> None:
        with self._lock:
            self._num_due += 1

    def __call__(self, source: memoryview) -> memoryview:
        with self._lock:
            if not self._num_due:
                return source
            self._num_due -= 1
        corrupted = bytearray(source)
        corrupted[len(corrupted) // 2] ^= 0x10
        return memoryview(corrupted)


class FaultyTransfer(KVTransfer):
    def __init__(self, inner: KVTransfer, faults: Faults, corruption: Corruption) -> None:
        self._inner = inner
        self._faults = faults
        self._late: list[Run] = []
        if faults.corrupts:
            corruption.ask()

    @property
    def num_bytes_sent(self) -> int:
        return self._inner.num_bytes_sent

    async def send(self, runs: Sequence[Run]) -> None:
        await befall(self._faults, Stage.SEND)
        if self._faults.are_of_order:
            runs = self._hold_back(runs)
        await self._inner.send(runs)

    async def seal(self, seal: Seal) -> Seal:
        await befall(self._faults, Stage.SEAL)
        if self._faults.drops_seal:
            return seal
        if self._faults.seal_first:
            sealed = await self._inner.seal(seal)
            await self._inner.send(self._late)
            return sealed
        if not self._faults.drops_run:
            await self._inner.send(self._late)
        return await self._inner.seal(seal)

    async def cancel(self) -> bool:
        return await self._inner.cancel()

    def _hold_back(self, runs: Sequence[Run]) -> list[Run]:
        """What is sent now. What comes later, if at all, is kept: all of it in reverse order, or the last block."""
        blocks = [
            Run(BlockId(run.source_block + index), run.position + index, 1)
            for run in runs
            for index in range(run.num_blocks)
        ]
        if self._faults.reorders:
            self._late = [*reversed(blocks), *self._late]
            return []
        if self._faults.duplicates:
            self._late = blocks[-1:]
            return blocks
        blocks = [*self._late, *blocks]
        self._late = blocks[-1:]
        return blocks[:-1]


class FaultySender(KVSender):
    """`corruption` must be the tap that `inner` was made with; `create_faulty_senders` sees to it."""

    def __init__(self, inner: SenderSet, faults: Faults, corruption: Corruption) -> None:
        self._inner = inner
        self._faults = faults
        self._corruption = corruption
        self._numbers = itertools.count()

    def choose(self, addresses: Sequence[str]) -> str:
        return self._inner.choose(addresses)

    async def open(self, grant: Grant, address: str | None = None) -> KVTransfer:
        faults = self._faults if next(self._numbers) % self._faults.every == 0 else _NONE
        await befall(faults, Stage.OPEN)
        return FaultyTransfer(await self._inner.open(grant, address), faults, self._corruption)

    async def close(self) -> None:
        await self._inner.close()


def create_faulty_senders(
    faults: Faults,
    connector: str,
    region: KVRegion,
    identity: Identity,
    options: TransferOptions,
    network: LoopbackNetwork | None = None,
) -> FaultySender:
    """As `create_senders`, with faults."""
    corruption = Corruption()
    return FaultySender(
        create_senders(connector, region, identity, options, network, corruption), faults, corruption
    )


async def befall(faults: Faults, stage: Stage) -> None:
    """The delay and the failure that are due before `stage`. Raises TransferFailed."""
    if faults.delay_s:
        await asyncio.sleep(faults.delay_s)
    if faults.fails_at is stage:
        raise TransferFailed(f"a fault was injected at {stage}")
