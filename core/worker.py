"""What a worker says of itself: in the registry and in a session's hello."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from core.ids import Epoch, WorkerId
from core.kv_spec import KVSpec


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class WorkerShape(NamedTuple):
    """What the engine's configuration and model decide about a worker."""

    role: Role
    kv_spec: KVSpec
    context_len: int
    vocab_size: int
    num_blocks: int
    max_batch: int
    max_local_tokens: int


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One incarnation of one worker. `address` is host:port of its gRPC session server; `connector` is the
    transfer scheme it was told to use; `context_len` bounds prompt plus output in tokens; `model` is the
    public model id. A decode worker computes a prompt itself if it lacks at most `max_local_tokens` of it."""

    worker_id: WorkerId
    epoch: Epoch
    role: Role
    address: str
    model: str
    kv_spec: KVSpec
    context_len: int
    vocab_size: int
    num_blocks: int
    max_batch: int
    connector: str = "auto"
    max_local_tokens: int = 0

    @property
    def key(self) -> tuple[WorkerId, Epoch]:
        return self.worker_id, self.epoch

    @property
    def is_colocated(self) -> bool:
        """It computes any prompt itself: whoever has such a worker needs no prefill tier."""
        return self.role is Role.DECODE and self.max_local_tokens >= self.context_len
