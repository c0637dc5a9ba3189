"""How fast KV blocks get from pool to pool: `tandem bench transfer`, on every connector that this machine has.

A transfer is what a handoff does, by the same code: a grant is signed and expected, the sender opens it, digests and
sends the blocks, seals, and the receiver verifies every digest. Before each one a byte of every block of the receiver
is spoiled, so that only bytes which arrived can pass. UCX listens on every interface while it is measured.
"""

import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from bench import plots, report, transfer_limits
from bench.report import Rows
from bench.transfer_peer import Answer, Sender, Wiring
from core.errors import TransferFailed, error_from
from core.grant import Grant, GrantSigner
from core.ids import BlockId, HandoffId, RequestId, WorkerId, new_epoch
from core.kv_region import KVRegion
from core.kv_spec import DType, KVSpec
from kv_transfer import loopback, ucx
from kv_transfer.base import Identity
from kv_transfer.connectors import create_receivers, known_connectors
from kv_transfer.loopback import LoopbackNetwork

SIZES = tuple(4096 << shift for shift in range(0, 17, 2))
BLOCK_TOKENS = 16
BLOCK_STEP = 2 * BLOCK_TOKENS * DType.BFLOAT16.num_bytes
"""Bytes of a block of the narrowest model: one layer, one head of one dimension."""
LIMIT_S = 60.0
UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
OWN_BENCHMARKS = {"shm": "copy into a memfd", "tcp": "bare socket", "ucx": "UCX's own benchmark"}
NOTES = (
    "A transfer: a grant signed, opened, every block digested, sent and sealed, every digest verified. Medians.",
    "The bare socket is one way between two processes; UCX's own benchmark sends both ways at once, and its figure "
    "is half of a round; copies are within one process, small ones within its caches.",
)
COLUMNS = ("blocks", "repeats", "us", "MB/s", "of memcpy", "own, MB/s", "of its own")
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes of the transfers, and the connectors. The smallest is one block."""

    sizes: tuple[int, ...] = SIZES
    connectors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        block = min(self.sizes, default=0)
        if block <= 0 or block % BLOCK_STEP or any(size % block for size in self.sizes):
            raise ValueError(
                f"--sizes: the smallest must be a multiple of {BLOCK_STEP} bytes and the others of that one, "
                f"got {', '.join(map(str, self.sizes))}"
            )
        unknown = set(self.connectors) - set(here())
        if unknown:
            raise ValueError(
                f"--connectors: {', '.join(sorted(unknown))} is not here; {', '.join(here())} are"
            )

    @classmethod
    def read(cls, sizes: str, connectors: str) -> "Plan":
        """From the words of a command line, `4k,1m` and `shm,tcp`; nothing is everything."""
        wanted = tuple(sorted({_bytes_of(word) for word in sizes.split(",") if word})) or SIZES
        return cls(wanted, tuple(word for word in connectors.split(",") if word) or here())

    @property
    def spec(self) -> KVSpec:
        return KVSpec(1, 1, min(self.sizes) // BLOCK_STEP, BLOCK_TOKENS, DType.BFLOAT16, "bench")


@dataclass(frozen=True, slots=True)
class Measured:
    """Transfers of one size on one connector. `own_s` is what the transport takes by itself, None where there is no
    saying; `memcpy_s` what a copy in memory does."""

    num_bytes: int
    num_blocks: int
    num_repeats: int
    transfer_s: float
    memcpy_s: float
    own_s: float | None

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.transfer_s

    @property
    def to_memcpy(self) -> float:
        """How much of a copy's rate it reaches."""
        return self.memcpy_s / self.transfer_s

    @property
    def to_own(self) -> float | None:
        """And how much of its transport's own."""
        return self.own_s / self.transfer_s if self.own_s is not None else None


def here() -> tuple[str, ...]:
    """The connectors that this machine has."""
    return tuple(name for name in known_connectors() if name != ucx.SCHEME or ucx.find_library() is not None)


def _bytes_of(word: str) -> int:
    number, unit = word.strip().lower(), 1
    if number[-1:] in UNITS:
        number, unit = number[:-1], UNITS[number[-1]]
    if not number.isdecimal():
        raise ValueError(f"--sizes: bytes, with commas between, as 4096,64k,1m: got {word!r}")
    return int(number) * unit


class Pair:
    """Two workers of one connector: a pool that is written to, here, and whoever writes into it."""

    def __init__(self, plan: Plan, connector: str, network: LoopbackNetwork) -> None:
        self._num_blocks = max(plan.sizes) // plan.spec.block_bytes
        self.wiring = Wiring(connector, plan.spec, self._num_blocks)
        self.region = KVRegion.create(plan.spec.block_bytes, self._num_blocks)
        self._identity = Identity(WorkerId("bench-receiver"), new_epoch(), plan.spec)
        self._signer = GrantSigner()
        self._network = network
        verify = self._signer.verify
        self._receivers = create_receivers(
            [connector], self.region, self._identity, verify, network=self._network
        )
        self._send: Callable[[Grant], Awaitable[float]]

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        is_local = self.wiring.connector == loopback.SCHEME
        try:
            await self._receivers.start()
            sender = _local_sender(self.wiring, self._network) if is_local else _remote_sender(self.wiring)
            async with sender as self._send:
                yield
        finally:
            await self._receivers.close()
            self.region.close()

    async def transfer(self, num_blocks: int) -> float:
        """How long one took, without the grant's way to the sender. Raises what a handoff does."""
        self._spoil(num_blocks)
        began_granting_s = time.monotonic()
        grant = self._grant(num_blocks)
        granting_s = time.monotonic() - began_granting_s
        verified = asyncio.create_task(self._verified(grant.handoff_id))
        try:
            began_s = await self._send(grant)
            return granting_s + await verified - began_s
        finally:
            verified.cancel()

    async def _verified(self, handoff_id: HandoffId) -> float:
        await self._receivers.wait_sealed(handoff_id, LIMIT_S)
        return time.monotonic()

    def _grant(self, num_blocks: int) -> Grant:
        handoff_id = HandoffId(RequestId(f"bench-{next(_numbers)}"), 1)
        num_tokens = num_blocks * BLOCK_TOKENS
        block_ids = tuple(map(BlockId, range(num_blocks)))
        worker_id, epoch = self._identity.worker_id, self._identity.epoch
        unsigned = Grant(handoff_id, worker_id, epoch, num_tokens, 0, block_ids, self._receivers.addresses)
        grant = self._signer.sign(unsigned)
        self._receivers.expect(grant)
        return grant

    def _spoil(self, num_blocks: int) -> None:
        with self.region.view(BlockId(0), num_blocks) as memory:
            np.frombuffer(memory, np.uint8)[:: self.region.block_bytes] ^= 0xFF


@contextlib.asynccontextmanager
async def _local_sender(
    wiring: Wiring, network: LoopbackNetwork
) -> AsyncIterator[Callable[[Grant], Awaitable[float]]]:
    sender = Sender(wiring, network)
    try:
        yield sender.send
    finally:
        await sender.close()


@contextlib.asynccontextmanager
async def _remote_sender(wiring: Wiring) -> AsyncIterator[Callable[[Grant], Awaitable[float]]]:
    pipe = asyncio.subprocess.PIPE
    arguments = ("-m", "bench.transfer_peer", "connector", msgspec.json.encode(wiring).decode())
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=pipe, stdout=pipe)
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    async def send(grant: Grant) -> float:
        stdin.write(msgspec.json.encode(grant) + b"\n")
        line = await stdout.readline()
        if not line:
            raise TransferFailed("the sending process has ended")
        answer = msgspec.json.decode(line, type=Answer)
        if answer.error_code:
            raise error_from(answer.error_code, answer.error)
        return answer.began_s

    try:
        yield send
        stdin.close()
        await asyncio.wait_for(process.wait(), LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def measure_connector(plan: Plan, connector: str) -> dict[int, list[float]]:
    """The seconds of each transfer by its bytes, after one of each size that does not count."""
    pair = Pair(plan, connector, LoopbackNetwork())
    times: dict[int, list[float]] = {}
    async with pair.connected():
        for size in plan.sizes:
            num_blocks, times[size] = size // plan.spec.block_bytes, []
            await pair.transfer(num_blocks)
            while not transfer_limits.is_enough(times[size]):
                times[size].append(await pair.transfer(num_blocks))
    return times


def measure(plan: Plan) -> dict[str, list[Measured]]:
    """Connector by connector, each beside its transport's own benchmark. Raises TransferFailed."""
    copies_s = {size: transfer_limits.memcpy_s(size) for size in plan.sizes}
    found: dict[str, list[Measured]] = {}
    for connector in plan.connectors:
        times = asyncio.run(measure_connector(plan, connector))
        medians_s = {size: statistics.median(each) for size, each in times.items()}
        own_s = _own_s(connector, medians_s)
        found[connector] = [
            Measured(
                size,
                size // plan.spec.block_bytes,
                len(times[size]),
                medians_s[size],
                copies_s[size],
                own_s.get(size),
            )
            for size in plan.sizes
        ]
    return found


def _own_s(connector: str, medians_s: Mapping[int, float]) -> dict[int, float]:
    match connector:
        case "shm":
            return {size: transfer_limits.shared_copy_s(size) for size in medians_s}
        case "tcp":
            return transfer_limits.tcp_s(list(medians_s))
        case "ucx":
            return transfer_limits.ucx_s(medians_s)
        case _:
            return {}


def run(
    plan: Plan, json_path: Path | None = None, html_path: Path | None = None
) -> dict[str, list[Measured]]:
    """Measure, print a table for each connector, write the files."""
    found = measure(plan)
    console = Console(width=max(100, Console().width))
    for name, each in found.items():
        table = Table(title=_heading(name))
        for column in ("", *COLUMNS):
            table.add_column(column, justify="right")
        for row, cells in rows_of(each):
            table.add_row(row, *cells)
        console.print(table)
    for note in NOTES:
        console.print(note, soft_wrap=True)
    if json_path is not None:
        report.write(json_path, json.dumps(as_json(plan, found), indent=1))
    if html_path is not None:
        tables = {_heading(name): (COLUMNS, rows_of(each)) for name, each in found.items()}
        page = report.page("KV blocks from pool to pool", [], tables, [_curve(found)], NOTES)
        report.write(html_path, page)
    return found


def _heading(connector: str) -> str:
    own = OWN_BENCHMARKS.get(connector)
    return f"{connector}; its own: {own}" if own else f"{connector}, in one process"


def rows_of(measured: Sequence[Measured]) -> Rows:
    return [(_size(each.num_bytes), _cells(each)) for each in measured]


def _cells(each: Measured) -> list[str]:
    cells = [f"{each.num_blocks}", f"{each.num_repeats}", f"{each.transfer_s * 1e6:.0f}"]
    cells += [f"{each.bytes_per_s / 1e6:.1f}", f"{each.to_memcpy:.2g}"]
    if each.own_s is None:
        return [*cells, "", ""]
    return [*cells, f"{each.num_bytes / each.own_s / 1e6:.1f}", f"{each.to_own:.2g}"]


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if not num_bytes % (1 << 20) else f"{num_bytes / 1024:g} KiB"


def as_json(plan: Plan, found: Mapping[str, Sequence[Measured]]) -> dict[str, object]:
    """Bytes and seconds; the plan's blocks, and a list for each connector."""
    told = msgspec.to_builtins({name: list(each) for name, each in found.items()})
    for name, each in found.items():
        for row, one in zip(told[name], each, strict=True):
            row |= {"bytes_per_s": one.bytes_per_s, "to_memcpy": one.to_memcpy, "to_own": one.to_own}
    return {
        "sizes": list(plan.sizes),
        "block_bytes": plan.spec.block_bytes,
        "own_benchmarks": {name: OWN_BENCHMARKS.get(name) for name in found},
        "machine": report.machine(),
        "connectors": told,
    }


def _curve(found: Mapping[str, Sequence[Measured]]) -> str:
    points = {
        name: [(each.num_bytes / 1024, each.bytes_per_s / 1e6) for each in measured]
        for name, measured in found.items()
    }
    copied = next(iter(found.values()))
    points["memcpy"] = [(each.num_bytes / 1024, each.num_bytes / each.memcpy_s / 1e6) for each in copied]
    return plots.curve(points, "Bytes of a transfer and its rate", "KiB", "MB/s", logs="xy")
