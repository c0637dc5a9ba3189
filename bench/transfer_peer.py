"""The other process of `bench.transfer`: the worker that sends, or the other end of what a transport does by itself.

    python -m bench.transfer_peer connector WIRING    a grant a line comes in, an Answer a line goes out
    python -m bench.transfer_peer tcp PORT NUM_BYTES  a socket: how many bytes are wanted, and they follow
    python -m bench.transfer_peer ucx-server ROUNDS   the library's own benchmark, a port a line goes out
    python -m bench.transfer_peer ucx-client ROUNDS   a port a line comes in, a median a line goes out

It ends with its input. Moments are `time.monotonic`, which all processes of a host share.
"""

import asyncio
import contextlib
import json
import os
import socket
import statistics
import struct
import sys
import time
from argparse import Namespace
from dataclasses import dataclass
from typing import BinaryIO

import msgspec
import numpy as np

from core.errors import TandemError
from core.grant import FirstToken, Grant, Seal
from core.ids import BlockHash, BlockId, WorkerId, new_epoch
from core.kv_region import KVRegion
from core.kv_spec import KVSpec
from kv_transfer.base import Identity, Run
from kv_transfer.connectors import create_senders
from kv_transfer.loopback import LoopbackNetwork

WANTED = struct.Struct("<q")
BEGAN = struct.Struct("<d")


@dataclass(frozen=True, slots=True)
class Wiring:
    """A pool of random bytes, and what it is sent on."""

    connector: str
    spec: KVSpec
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Answer:
    """When a transfer began, or why it failed."""

    began_s: float = 0.0
    error_code: str = ""
    error: str = ""


class Sender:
    """The prefill worker's side of handoffs."""

    def __init__(self, wiring: Wiring, network: LoopbackNetwork | None = None) -> None:
        self._identity = Identity(WorkerId("bench-sender"), new_epoch(), wiring.spec)
        self._region = KVRegion.create(wiring.spec.block_bytes, wiring.num_blocks)
        fill(self._region)
        self._senders = create_senders(wiring.connector, self._region, self._identity, network=network)

    async def send(self, grant: Grant) -> float:
        """As many of the pool's first blocks as are granted, and the seal. Returns when it began."""
        began_s = time.monotonic()
        transfer = await self._senders.open(grant)
        await transfer.send([Run(BlockId(0), 0, len(grant.block_ids))])
        await transfer.seal(self._seal(grant))
        return began_s

    def _seal(self, grant: Grant) -> Seal:
        return Seal(
            grant.handoff_id,
            self._identity.worker_id,
            self._identity.epoch,
            grant.epoch,
            grant.num_prompt_tokens,
            BlockHash(b""),
            (FirstToken(0, 0, 1, 0.0),),
        )

    async def close(self) -> None:
        await self._senders.close()
        self._region.close()


def fill(region: KVRegion) -> None:
    """With bytes of which no two blocks have the same."""
    with memoryview(region.memory) as memory:
        memory[:] = np.random.default_rng(1).bytes(len(memory))


async def serve_connector(wiring: Wiring, answers: BinaryIO) -> None:
    sender = Sender(wiring)
    try:
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            try:
                answer = Answer(await sender.send(msgspec.json.decode(line, type=Grant)))
            except TandemError as error:
                answer = Answer(error_code=error.code, error=str(error))
            _tell(answers, msgspec.json.encode(answer))
    finally:
        await sender.close()


def serve_tcp(port: int, num_bytes: int) -> None:
    """Before the bytes goes the moment at which they begin to."""
    source = memoryview(np.random.default_rng(1).bytes(num_bytes))
    with socket.create_connection(("127.0.0.1", port)) as connected:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while asked := connected.recv(WANTED.size, socket.MSG_WAITALL):
            (wanted,) = WANTED.unpack(asked)
            connected.sendall(BEGAN.pack(time.monotonic()))
            connected.sendall(source[:wanted])


class _Told:
    """What the library's benchmark puts its results into: a port, or how long each round took."""

    def __init__(self, answers: BinaryIO) -> None:
        self._answers = answers

    def put(self, result: int | list[float]) -> None:
        value = statistics.median(result) if isinstance(result, list) else result
        _tell(self._answers, json.dumps(value).encode())


def serve_ucx(is_server: bool, rounds: list[tuple[int, int]], answers: BinaryIO) -> None:
    """`rounds`: of so many bytes, so often. Waiting is as in our connector, in the system, not in a loop."""
    from ucxx.benchmarks.backends.ucxx_core import UCXPyCoreClient, UCXPyCoreServer
    from ucxx.exceptions import UCXConnectionResetError

    for num_bytes, num_repeats in rounds:
        asked = _ucx_arguments(num_bytes, num_repeats)
        if is_server:
            # The client hangs up as soon as its own last message is done, which may be before the server's is.
            with contextlib.suppress(UCXConnectionResetError):
                UCXPyCoreServer(asked, _Told(answers)).run()
        else:
            port = int(sys.stdin.buffer.readline())
            UCXPyCoreClient(asked, _Told(answers), "127.0.0.1", port).run()


def _ucx_arguments(num_bytes: int, num_repeats: int) -> Namespace:
    """The options of the library's `send_recv` that its backend reads."""
    absent = ("enable_am", "asyncio_wait", "cuda_profile", "report_gil_contention", "rmm_managed_memory")
    return Namespace(
        n_bytes=num_bytes,
        n_iter=num_repeats,
        n_warmup_iter=1,
        object_type="numpy",
        progress_mode="blocking",
        reuse_alloc=True,
        error_handling=True,
        port=None,
        rmm_init_pool_size=None,
        **dict.fromkeys(absent, False),
    )


def _tell(answers: BinaryIO, line: bytes) -> None:
    answers.write(line + b"\n")
    answers.flush()


def main() -> None:
    role, *told = sys.argv[1:]
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library that prints must not spoil an answer
    if role == "connector":
        asyncio.run(serve_connector(msgspec.json.decode(told[0], type=Wiring), answers))
    elif role == "tcp":
        serve_tcp(int(told[0]), int(told[1]))
    else:
        serve_ucx(role == "ucx-server", json.loads(told[0]), answers)


if __name__ == "__main__":
    main()
