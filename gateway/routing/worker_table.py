"""What routing and admission look at, of one tier's workers: columns of numbers, so that a decision over a thousand
workers is a few operations on vectors. No I/O; knows nothing of sessions.

    slot          0      1      2      ...  len-1   len ...
    ahead       [ 500  |  10  |   0  | ... |      | unused ]     a WorkerRow writes its slot; one that
    sequences   [   3  |   0  |   8  | ... |      | unused ]     is removed gives it to the last row
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.ids import Epoch
from core.load import Load
from core.worker import WorkerRecord

Column = NDArray[np.float64]
FIRST_CAPACITY = 16
COLUMNS = (
    "is_open",  # 1 for those that take something new
    "is_colocated",
    "pool_tokens",  # what the whole pool holds
    "max_batch",
    "order",  # of the names, to break ties
    "ahead",  # prompt tokens to compute before another prompt's: published or sent, whichever is more
    "tokens_per_s",
    "sequences",  # in the batch or waiting for it, published or sent, whichever is more; less the suspended
    "published",  # sequences that the worker has told of, and those of them that are suspended
    "suspended",
    "running",
    "free_blocks",
    "told_blocks",  # of the pool, once its load is known
)


class WorkerTable:
    """The workers of a tier. Each column is a vector over `rows`, in their order."""

    def __init__(self) -> None:
        self.rows: list[WorkerRow] = []
        self.by_epoch: dict[Epoch, WorkerRow] = {}
        self.block_size = 1
        self._columns = np.zeros((len(COLUMNS), FIRST_CAPACITY))

    def column(self, name: str) -> Column:
        """A view: it changes with the rows."""
        values: Column = self._columns[_INDEX[name], : len(self.rows)]
        return values

    def add(self, record: WorkerRecord) -> "WorkerRow":
        """Closed, with an empty load."""
        if len(self.rows) == self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
        row = WorkerRow(self, record, len(self.rows))
        self._columns[:, len(self.rows)] = 0.0
        self.rows.append(row)
        self.by_epoch[record.epoch] = row
        self.block_size = record.kv_spec.block_size
        self._sort_names()
        row.write()
        return row

    def remove(self, row: "WorkerRow") -> None:
        """Whoever still has the row may go on writing it, in vain."""
        assert row.slot is not None, row.record.worker_id
        last = self.rows.pop()
        if last is not row:
            self._columns[:, row.slot] = self._columns[:, len(self.rows)]
            self.rows[row.slot] = last
            last.slot = row.slot
        row.slot = None
        del self.by_epoch[row.record.epoch]
        self._sort_names()

    def set(self, slot: int | None, **values: float) -> None:
        """Nothing for a row that was removed."""
        if slot is not None:
            for name, value in values.items():
                self._columns[_INDEX[name], slot] = value

    @property
    def num_open(self) -> int:
        return int(self.column("is_open").sum())

    def _sort_names(self) -> None:
        ordered = sorted(self.rows, key=lambda row: row.record.worker_id)
        for order, row in enumerate(ordered):
            self.set(row.slot, order=order)


_INDEX = {name: index for index, name in enumerate(COLUMNS)}


class WorkerRow:
    """One worker: its load as published, and what was sent to it that its load may not show yet."""

    __slots__ = (
        "_table",
        "is_fitting",
        "is_up",
        "load",
        "num_pending",
        "num_pending_tokens",
        "record",
        "slot",
    )

    def __init__(self, table: WorkerTable, record: WorkerRecord, slot: int) -> None:
        self._table = table
        self.record = record
        self.slot: int | None = slot
        self.load = Load()
        self.is_up = False
        self.is_fitting = True
        self.num_pending_tokens = 0
        self.num_pending = 0

    def publish(self, load: Load) -> None:
        self.load = load
        self.write()

    def pend_tokens(self, num_tokens: int) -> None:
        """So many more prompt tokens were sent; fewer if negative."""
        self.num_pending_tokens += num_tokens
        self._table.set(self.slot, ahead=max(self.load.num_queued_tokens, self.num_pending_tokens))

    def pend_sequences(self, num_sequences: int) -> None:
        """So many more were sent; fewer if negative."""
        self.num_pending += num_sequences
        self._table.set(self.slot, sequences=self.num_sequences)

    def set_up(self, is_up: bool) -> None:
        """Whether it can be reached."""
        self.is_up = is_up
        self._table.set(self.slot, is_open=self.is_open)

    def set_fitting(self, is_fitting: bool) -> None:
        """Whether its model and geometry are those that are served."""
        self.is_fitting = is_fitting
        self._table.set(self.slot, is_open=self.is_open)

    @property
    def is_open(self) -> bool:
        """It takes something new."""
        return self.is_up and self.is_fitting and not self.load.is_draining

    @property
    def num_sequences(self) -> int:
        load = self.load
        return max(load.num_running + load.num_waiting, self.num_pending) - load.num_suspended

    def write(self) -> None:
        """Everything into the table."""
        record, load = self.record, self.load
        values: dict[str, Any] = {
            "is_open": self.is_open,
            "is_colocated": record.is_colocated,
            "pool_tokens": record.num_blocks * record.kv_spec.block_size,
            "max_batch": record.max_batch,
            "ahead": max(load.num_queued_tokens, self.num_pending_tokens),
            "tokens_per_s": load.tokens_per_s,
            "sequences": self.num_sequences,
            "published": load.num_running + load.num_waiting,
            "suspended": load.num_suspended,
            "running": load.num_running,
            "free_blocks": load.num_free_blocks,
            "told_blocks": load.num_blocks,
        }
        self._table.set(self.slot, **values)
