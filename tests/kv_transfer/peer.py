"""The other worker of a transfer test: both roles as calls with JSON arguments, in this process or in its own.

As a program it reads one call a line from standard input and answers each when it is done, in any order; it ends
with its input. The tests use the same class directly for the loopback connector.
"""

import asyncio
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from core.errors import TandemError
from core.grant import Grant, GrantSigner, Seal
from core.ids import BlockId, Epoch, HandoffId, WorkerId
from core.kv_region import KVRegion
from core.kv_spec import KVSpec
from kv_transfer.base import Identity, KVTransfer, Run, TransferOptions
from kv_transfer.connectors import ReceiverSet, SenderSet, create_receivers, create_senders
from kv_transfer.loopback import LoopbackNetwork


class Config(msgspec.Struct):
    """`seed` decides the bytes of the pool."""

    connector: str
    spec: KVSpec
    num_blocks: int
    seed: int
    worker_id: str = "prefill-peer"
    epoch: int = 77
    options: TransferOptions = TransferOptions()


class Call(msgspec.Struct):
    number: int
    name: str
    arguments: msgspec.Raw


class Answer(msgspec.Struct):
    number: int
    result: Any = None
    error_code: str | None = None
    error: str | None = None


def pool_bytes(config: Config) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """One row a block."""
    rng = np.random.default_rng(config.seed)
    return rng.integers(0, 256, (config.num_blocks, config.spec.block_bytes), dtype=np.uint8)


class Gate:
    """A tap that holds copies back on command."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_open.set()
        self.is_reached = threading.Event()

    def __call__(self, source: memoryview) -> memoryview:
        self.is_reached.set()
        self.is_open.wait()
        return source


class Peer:
    def __init__(self, config: Config, network: LoopbackNetwork | None = None) -> None:
        self.config = config
        self.identity = Identity(WorkerId(config.worker_id), Epoch(config.epoch), config.spec)
        self.region = KVRegion.create(config.spec.block_bytes, config.num_blocks)
        with memoryview(self.region.memory) as memory:
            memory[:] = pool_bytes(config).tobytes()
        self.gate = Gate()
        self.network = network
        self.transfers: dict[HandoffId, KVTransfer] = {}
        self.senders = self._create_senders(config.connector)
        self.receivers: ReceiverSet | None = None
        self.signer = GrantSigner()
        self.calls: dict[str, Callable[..., Awaitable[Any]]] = {
            "open": self.open,
            "send": self.send,
            "seal": self.seal,
            "cancel": self.cancel,
            "num_bytes_sent": self.num_bytes_sent,
            "hold": self.hold,
            "held": self.held,
            "release": self.release,
            "listen": self.listen,
            "expect": self.expect,
            "wait_sealed": self.wait_sealed,
            "close_senders": self.close_senders,
            "num_fds": self.num_fds,
            "loaded": self.loaded,
        }

    def _create_senders(self, connector: str) -> SenderSet:
        options = self.config.options
        return create_senders(connector, self.region, self.identity, options, self.network, self.gate)

    async def open(self, grant: Grant) -> None:
        self.transfers[grant.handoff_id] = await self.senders.open(grant)

    async def send(self, handoff_id: HandoffId, runs: list[Run]) -> None:
        await self.transfers[handoff_id].send(runs)

    async def seal(self, seal: Seal) -> Seal:
        return await self.transfers[seal.handoff_id].seal(seal)

    async def cancel(self, handoff_id: HandoffId) -> bool:
        return await self.transfers[handoff_id].cancel()

    async def num_bytes_sent(self, handoff_id: HandoffId) -> int:
        return self.transfers[handoff_id].num_bytes_sent

    async def hold(self) -> None:
        self.gate.is_open.clear()
        self.gate.is_reached.clear()

    async def held(self) -> bool:
        """Once a copy is being held back."""
        return await asyncio.to_thread(self.gate.is_reached.wait, 10)

    async def release(self) -> None:
        self.gate.is_open.set()

    async def listen(self) -> None:
        self.receivers = create_receivers(
            [self.config.connector],
            self.region,
            self.identity,
            self.signer.verify,
            self.config.options,
            self.network,
        )
        await self.receivers.start()

    async def expect(self, handoff_id: HandoffId, block_ids: tuple[BlockId, ...]) -> Grant:
        assert self.receivers is not None
        num_tokens = len(block_ids) * self.config.spec.block_size
        grant = Grant(
            handoff_id,
            self.identity.worker_id,
            self.identity.epoch,
            num_tokens,
            0,
            block_ids,
            self.receivers.addresses,
        )
        grant = replace(grant, mac=self.signer.mac(grant))
        self.receivers.expect(grant)
        return grant

    async def wait_sealed(self, handoff_id: HandoffId) -> Seal:
        assert self.receivers is not None
        return await self.receivers.wait_sealed(handoff_id, 10.0)

    async def close_senders(self) -> None:
        """Drop every connection and begin anew."""
        await self.senders.close()
        self.transfers.clear()
        self.senders = self._create_senders(self.config.connector)

    async def num_fds(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    async def loaded(self) -> list[str]:
        return sorted(sys.modules)

    async def close(self) -> None:
        self.gate.is_open.set()
        await self.senders.close()
        if self.receivers is not None:
            await self.receivers.close()
        self.region.close()

    async def handle(self, call: Call) -> Answer:
        method = self.calls[call.name]
        hints = [hint for name, hint in method.__annotations__.items() if name != "return"]
        arguments = msgspec.json.decode(call.arguments, type=tuple[tuple(hints)])  # type: ignore[misc]
        try:
            return Answer(call.number, await method(*arguments))
        except TandemError as error:
            return Answer(call.number, error_code=error.code, error=str(error))


async def serve(config: Config) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library that prints must not spoil an answer
    peer = Peer(config)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    handling: set[asyncio.Task[None]] = set()

    async def answer(call: Call) -> None:
        answers.write(msgspec.json.encode(await peer.handle(call)) + b"\n")
        answers.flush()

    async for line in reader:
        task = loop.create_task(answer(msgspec.json.decode(line, type=Call)))
        handling.add(task)
        task.add_done_callback(handling.discard)
    await peer.close()


if __name__ == "__main__":
    asyncio.run(serve(msgspec.json.decode(sys.argv[1], type=Config)))
