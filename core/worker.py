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


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One incarnation of one worker. `address` is host:port of its gRPC session server; `connector` is the
    transfer scheme it was told to use; `context_len` bounds prompt plus output in tokens; `model` is the
    public model id."""

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

    @property
    def key(self) -> tuple[WorkerId, Epoch]:
        return self.worker_id, self.epoch
