"""What routing and admission look at, of one tier's workers: columns of numbers, so that a decision over a thousand
workers is a few operations on vectors. No I/O; knows nothing of sessions.

    slot          0      1      2      ...  len-1   len ...
    ahead       [ 500  |  10  |   0  | ... |      | unused ]     a WorkerRow writes its slot; one that
    sequences   [   3  |   0  |   8  | ... |      | unused ]     is removed gives it to the last row
"""

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
    "ahead",  # prompt tokens to compute before another prompt's: sent, and published beyond that
    "tokens_per_s",
    "sequences",  # in the batch or waiting for it, published or sent, whichever is more; less the suspended
    "share",  # of the batch that these would fill
    "room",  # free part of the pool
    "published",  # sequences that the worker has told of, and those of them that are suspended
    "suspended",
    "running",
    "free_blocks",
    "told_blocks",  # of the pool, once its load is known
    "order",  # see WorkerTable.order
)


class WorkerTable:
    """The workers of a tier. Each column is a vector over `rows`, in their order."""

    def __init__(self) -> None:
        self.rows: list[WorkerRow] = []
        self.by_epoch: dict[Epoch, WorkerRow] = {}
        self.block_size = 1
        self._is_ordered = True
        self._columns = np.zeros((len(COLUMNS), FIRST_CAPACITY))

    def column(self, name: str) -> Column:
        """A view: it changes with the rows."""
        values: Column = self._columns[_INDEX[name], : len(self.rows)]
        return values

    @property
    def order(self) -> Column:
        """The rows' places by name, to break ties."""
        if not self._is_ordered:
            for place, row in enumerate(sorted(self.rows, key=lambda row: row.record.worker_id)):
                self.set(row.slot, order=place)
            self._is_ordered = True
        return self.column("order")

    def totals(self) -> dict[str, int]:
        """The sum of each column over the open ones."""
        used = self._columns[:, : len(self.rows)]
        return dict(zip(COLUMNS, (used @ used[_INDEX["is_open"]]).astype(int).tolist(), strict=True))

    def add(self, record: WorkerRecord) -> "WorkerRow":
        """Closed, with an empty load."""
        if len(self.rows) == self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
        row = WorkerRow(self, record, len(self.rows))
        self._columns[:, len(self.rows)] = 0.0
        self.rows.append(row)
        self.by_epoch[record.epoch] = row
        self.block_size = record.kv_spec.block_size
        self._is_ordered = False
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
        self._is_ordered = False

    def set(self, slot: int | None, **values: float) -> None:
        """Nothing for a row that was removed."""
        if slot is not None:
            for name, value in values.items():
                self._columns[_INDEX[name], slot] = value

    def set_all(self, slot: int | None, values: tuple[float, ...]) -> None:
        """The same for every column but the last, in their order."""
        if slot is not None:
            self._columns[:-1, slot] = values

    @property
    def num_open(self) -> int:
        return int(self.column("is_open").sum())


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
        "num_pending_whole",
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
        self.num_pending_whole = 0
        self.num_pending = 0

    def publish(self, load: Load) -> None:
        self.load = load
        self.write()

    def pend_tokens(self, num_tokens: int, num_cached: int = 0) -> None:
        """So many more prompt tokens were sent that are to be computed there, and so many that are not; fewer if
        negative."""
        self.num_pending_tokens += num_tokens
        self.num_pending_whole += num_tokens + num_cached
        self._table.set(self.slot, ahead=self.num_ahead)

    def pend_sequences(self, num_sequences: int) -> None:
        """So many more were sent; fewer if negative."""
        self.num_pending += num_sequences
        num_sequences = self.num_sequences
        self._table.set(self.slot, sequences=num_sequences, share=num_sequences / self.record.max_batch)

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
    def num_ahead(self) -> int:
        """What was sent, and of what is published (which counts waiting prompts whole) the part that others sent."""
        return self.num_pending_tokens + max(self.load.num_queued_tokens - self.num_pending_whole, 0)

    @property
    def num_sequences(self) -> int:
        load = self.load
        return max(load.num_running + load.num_waiting, self.num_pending) - load.num_suspended

    def write(self) -> None:
        """Everything into the table."""
        record, load = self.record, self.load
        self._table.set_all(
            self.slot,
            (
                self.is_open,
                record.is_colocated,
                record.num_blocks * record.kv_spec.block_size,
                record.max_batch,
                self.num_ahead,
                load.tokens_per_s,
                self.num_sequences,
                self.num_sequences / record.max_batch,
                load.num_free_blocks / record.num_blocks,
                load.num_running + load.num_waiting,
                load.num_suspended,
                load.num_running,
                load.num_free_blocks,
                load.num_blocks,
            ),
        )
