"""Workers as routing sees them."""

from collections.abc import Iterable
from dataclasses import dataclass

from core.ids import Epoch, WorkerId
from core.kv_spec import DType, KVSpec
from core.load import Load
from core.worker import Role, WorkerRecord
from gateway.routing.worker_table import WorkerTable

SPEC = KVSpec(2, 2, 16, 16, DType.FLOAT32, "m")
EMPTY = Load(num_blocks=64, num_free_blocks=64)


@dataclass(frozen=True)
class Known:
    """What a row is to hold."""

    record: WorkerRecord
    load: Load = EMPTY
    num_pending_tokens: int = 0
    num_pending: int = 0


def known(
    name: str,
    load: Load = EMPTY,
    num_blocks: int = 64,
    max_batch: int = 8,
    max_local_tokens: int = 0,
    **pending: int,
) -> Known:
    record = WorkerRecord(
        WorkerId(name),
        Epoch(int.from_bytes(name.encode())),
        Role.DECODE,
        "host:1",
        "m",
        SPEC,
        4096,
        300,
        num_blocks,
        max_batch,
        max_local_tokens=max_local_tokens,
    )
    return Known(record, load, **pending)


def table_of(workers: Iterable[Known]) -> WorkerTable:
    """All open."""
    table = WorkerTable()
    for worker in workers:
        row = table.add(worker.record)
        row.set_up(True)
        row.publish(worker.load)
        row.pend_tokens(worker.num_pending_tokens)
        row.pend_sequences(worker.num_pending)
    return table
