"""Two workers for each transfer test: the decode side here, the prefill side in a process of its own (or here too,
for loopback)."""

import asyncio
import importlib.util
import itertools
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from core.errors import error_from
from core.grant import FirstToken, Grant, GrantSigner, Seal
from core.ids import BlockHash, BlockId, HandoffId, RequestId, WorkerId, new_epoch
from core.kv_region import KVRegion
from core.kv_spec import DType, KVSpec
from kv_transfer.base import Identity, Run, TransferOptions
from kv_transfer.connectors import ReceiverSet, create_receivers, known_connectors
from kv_transfer.loopback import LoopbackNetwork

PEER_PATH = Path(__file__).with_name("peer.py")
SPEC = KVSpec(2, 2, 16, 4, DType.FLOAT32, "tests")
NUM_BLOCKS = 96
OPTIONS = TransferOptions(piece_bytes=4 * SPEC.block_bytes, grace_s=0.3)
_numbers = itertools.count(1)


def _load_peer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kv_transfer_test_peer", PEER_PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


peer = _load_peer()


class Prefill:
    """Calls to the other worker. An error there is raised here as what it was."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.blocks = peer.pool_bytes(config)

    async def call(self, name: str, *arguments: Any) -> Any:
        call = peer.Call(next(_numbers), name, msgspec.Raw(msgspec.json.encode(arguments)))
        answer = await self._exchange(call)
        if answer.error_code is not None:
            raise error_from(answer.error_code, answer.error)
        return answer.result

    async def _exchange(self, call: Any) -> Any:
        raise NotImplementedError

    async def open(self, grant: Grant) -> None:
        await self.call("open", grant)

    async def send(self, handoff_id: HandoffId, runs: Sequence[Run]) -> None:
        await self.call("send", handoff_id, runs)

    async def seal(self, seal: Seal) -> Seal:
        return msgspec.convert(await self.call("seal", seal), Seal)

    async def expect(self, handoff_id: HandoffId, block_ids: Sequence[int]) -> Grant:
        """As a receiver: a grant of its own, expected."""
        return msgspec.convert(await self.call("expect", handoff_id, block_ids), Grant)

    async def cancel(self, handoff_id: HandoffId) -> bool:
        return bool(await self.call("cancel", handoff_id))

    def seal_of(self, grant: Grant) -> Seal:
        """What this worker would seal for `grant`, without runs."""
        return Seal(
            grant.handoff_id,
            WorkerId(self.config.worker_id),
            self.config.epoch,
            grant.epoch,
            grant.num_prompt_tokens,
            BlockHash(b"chain"),
            (FirstToken(0, 0, 42, -0.5),),
        )


class LocalPrefill(Prefill):
    def __init__(self, config: Any, network: LoopbackNetwork) -> None:
        super().__init__(config)
        self._peer = peer.Peer(config, network)

    async def _exchange(self, call: Any) -> Any:
        answer = await self._peer.handle(call)
        return msgspec.json.decode(msgspec.json.encode(answer), type=peer.Answer)

    async def close(self) -> None:
        await self._peer.close()


class ProcessPrefill(Prefill):
    _process: asyncio.subprocess.Process
    _reading: asyncio.Task[None]

    async def start(self) -> "ProcessPrefill":
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        pipe = asyncio.subprocess.PIPE
        arguments = (str(PEER_PATH), msgspec.json.encode(self.config).decode())
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdin=pipe, stdout=pipe
        )
        self._reading = asyncio.create_task(self._read())
        return self

    async def _exchange(self, call: Any) -> Any:
        assert self._process.stdin is not None
        answered = self._waiting[call.number] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(msgspec.json.encode(call) + b"\n")
        return await answered

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            answer = msgspec.json.decode(line, type=peer.Answer)
            self._waiting.pop(answer.number).set_result(answer)
        for answered in self._waiting.values():
            answered.set_exception(ConnectionResetError("the peer process has ended"))

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    async def kill(self) -> None:
        self._process.kill()
        await self._process.wait()

    async def close(self) -> int:
        """Its exit code."""
        if self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
        code = await asyncio.wait_for(self._process.wait(), 20)
        await self._reading
        return code


@dataclass
class Decode:
    """This process: the receiving worker."""

    receivers: ReceiverSet
    region: KVRegion
    identity: Identity
    signer: GrantSigner

    def grant(self, block_ids: Sequence[int], num_cached_tokens: int = 0, attempt: int = 0) -> Grant:
        """Signed and expected."""
        grant = self.sign(block_ids, num_cached_tokens, attempt)
        self.receivers.expect(grant)
        return grant

    def sign(self, block_ids: Sequence[int], num_cached_tokens: int = 0, attempt: int = 0) -> Grant:
        num_tokens = num_cached_tokens + len(block_ids) * SPEC.block_size
        grant = Grant(
            HandoffId(RequestId(f"r{next(_numbers)}"), attempt),
            self.identity.worker_id,
            self.identity.epoch,
            num_tokens,
            num_cached_tokens,
            tuple(BlockId(block) for block in block_ids),
            self.receivers.addresses,
        )
        return replace(grant, mac=self.signer.mac(grant))

    def blocks(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A copy of the pool, one row a block."""
        with memoryview(self.region.memory) as memory:
            return np.frombuffer(bytes(memory), np.uint8).reshape(self.region.num_blocks, -1)


def make_config(connector: str, **changes: Any) -> Any:
    fields = {"spec": SPEC, "num_blocks": NUM_BLOCKS, "seed": 5, "options": OPTIONS} | changes
    return peer.Config(connector, **fields)


async def _start_prefill(connector: str, network: LoopbackNetwork, **changes: Any) -> Any:
    config = make_config(connector, **changes)
    return LocalPrefill(config, network) if connector == "loopback" else await ProcessPrefill(config).start()


@pytest.fixture(scope="session", params=known_connectors())
def connector(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def network() -> LoopbackNetwork:
    return LoopbackNetwork()


@pytest.fixture(scope="session")
def options() -> TransferOptions:
    return OPTIONS


@pytest.fixture(scope="session")
def spec() -> KVSpec:
    return SPEC


@pytest.fixture(scope="session")
def start_prefill() -> Any:
    """Starts a prefill worker of the test's own; changes are to its peer.Config."""
    return _start_prefill


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def prefill(connector: str, network: LoopbackNetwork) -> AsyncIterator[Any]:
    """One for all tests of a module; they share its connections."""
    other = await _start_prefill(connector, network)
    yield other
    await other.close()


@pytest_asyncio.fixture(loop_scope="module")
async def decode(connector: str, network: LoopbackNetwork) -> AsyncIterator[Decode]:
    region = KVRegion.create(SPEC.block_bytes, NUM_BLOCKS)
    identity = Identity(WorkerId("decode-here"), new_epoch(), SPEC)
    signer = GrantSigner()
    receivers = create_receivers([connector], region, identity, signer.verify, OPTIONS, network)
    await receivers.start()
    yield Decode(receivers, region, identity, signer)
    await receivers.close()
    region.close()
