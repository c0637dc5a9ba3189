"""Names of things that cross process boundaries. Knows nothing of what they name."""

import os
import secrets
from typing import NamedTuple, NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
Epoch = NewType("Epoch", int)
BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)


class HandoffId(NamedTuple):
    """One try of passing one request from prefill to decode. A stale attempt is refused, never acted on."""

    request_id: RequestId
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"


def new_request_id() -> RequestId:
    """Unique whatever the client sends: 80 random bits in hex."""
    return RequestId(secrets.token_hex(10))


def new_epoch() -> Epoch:
    """A worker's incarnation: 63 random bits (a protobuf int64), compared for equality only."""
    return Epoch(secrets.randbits(63) | 1)


def new_worker_id(role: str) -> WorkerId:
    return WorkerId(f"{role}-{secrets.token_hex(4)}")


def host_id() -> str:
    """The same for two processes exactly when they can share memory: one boot, one IPC namespace."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
        namespace = os.stat("/proc/self/ns/ipc").st_ino
        return f"{boot.read().strip()}-{namespace}"
