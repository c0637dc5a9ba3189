"""What memory and transports do by themselves, with none of our code between: what `bench.transfer` compares with.

Each function answers with the seconds that so many bytes take, the median of several times. Knows no connectors.
"""

import contextlib
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bench.transfer_peer import BEGAN, WANTED
from core.errors import TransferFailed
from core.kv_region import KVRegion

MIN_REPEATS, MAX_REPEATS, SPENT_S = 3, 1000, 0.3
COPIED_AT_ONCE = 4 << 20
"""Bytes of small copies between two looks at the clock."""
LIMIT_S = 120.0

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def is_enough(times: Sequence[float]) -> bool:
    """Whether something was repeated often enough."""
    spent = sum(times) >= SPENT_S or len(times) >= MAX_REPEATS
    return len(times) >= MIN_REPEATS and spent


def median_s(once: Callable[[], float]) -> float:
    """Of the seconds that `once` answers with, after a time that does not count."""
    once()
    times: list[float] = []
    while not is_enough(times):
        times.append(once())
    return statistics.median(times)


def memcpy_s(num_bytes: int) -> float:
    """From one place of this process's memory to another."""
    return _copy_s(np.zeros(num_bytes, np.uint8), np.ones(num_bytes, np.uint8))


def shared_copy_s(num_bytes: int) -> float:
    """Into a memfd, through a second mapping of it as another process has one: what a shm sender does."""
    region = KVRegion.create(num_bytes, 1)
    mapped = KVRegion.attach(os.dup(region.fd), num_bytes, 1)
    try:
        with memoryview(mapped.memory) as memory:
            return _copy_s(np.frombuffer(memory, np.uint8), np.ones(num_bytes, np.uint8))
    finally:
        mapped.close()
        region.close()


def _copy_s(destination: Bytes, source: Bytes) -> float:
    at_once = max(1, COPIED_AT_ONCE // len(source))

    def once() -> float:
        began_s = time.perf_counter()
        for _ in range(at_once):
            np.copyto(destination, source)
        return (time.perf_counter() - began_s) / at_once

    return median_s(once)


def tcp_s(sizes: Sequence[int]) -> dict[int, float]:
    """From a process to this one through a socket of the loopback interface: from the first write to the last
    read."""
    with _connected(max(sizes)) as connected:
        target = memoryview(bytearray(max(sizes)))
        return {size: median_s(lambda size=size: _received_s(connected, target[:size])) for size in sizes}  # type: ignore[misc]


def _received_s(connected: socket.socket, target: memoryview) -> float:
    connected.sendall(WANTED.pack(len(target)))
    (began_s,) = BEGAN.unpack(connected.recv(BEGAN.size, socket.MSG_WAITALL))
    num_received = 0
    while num_received < len(target):
        received = connected.recv_into(target[num_received:])
        if not received:
            raise TransferFailed("the other end of the socket has ended")
        num_received += received
    return time.monotonic() - float(began_s)


@contextlib.contextmanager
def _connected(num_bytes: int) -> Iterator[socket.socket]:
    """To a process that sends up to so many bytes when it is asked."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(LIMIT_S)
        command = [sys.executable, "-m", "bench.transfer_peer", "tcp", str(listening.getsockname()[1])]
        with subprocess.Popen([*command, str(num_bytes)]) as process:
            try:
                connected, _ = listening.accept()
                with connected:
                    connected.settimeout(LIMIT_S)
                    yield connected
                process.wait(LIMIT_S)
            finally:
                process.kill()


def ucx_s(usual_s: Mapping[int, float]) -> dict[int, float]:
    """By the library's own benchmark, as far as it gets (not installed: empty): tagged messages of its core interface
    between two processes, both ways at once; its figure is half of such a round. `usual_s` says for each size how
    long a transfer takes about, hence how often to repeat it."""
    if importlib.util.find_spec("ucxx") is None:
        return {}
    rounds = [(size, _num_rounds(about_s)) for size, about_s in usual_s.items()]
    command = [sys.executable, "-m", "bench.transfer_peer"]
    told, pipe = json.dumps(rounds), subprocess.PIPE
    with (
        subprocess.Popen([*command, "ucx-server", told], stdout=pipe, env=_quiet()) as server,
        subprocess.Popen(
            [*command, "ucx-client", told], stdin=server.stdout, stdout=pipe, env=_quiet()
        ) as client,
    ):
        try:
            written = client.communicate(timeout=LIMIT_S)[0]
        except subprocess.TimeoutExpired as expired:
            written = expired.stdout or b""
        finally:
            server.kill()
            client.kill()
    return {size: float(line) / 2 for (size, _), line in zip(rounds, written.splitlines(), strict=False)}


def _num_rounds(about_s: float) -> int:
    return min(MAX_REPEATS, max(MIN_REPEATS, round(SPENT_S / about_s)))


def _quiet() -> dict[str, str]:
    """The library warns of variables that its binding itself sets."""
    return {"UCX_WARN_UNUSED_ENV_VARS": "n", **os.environ}
