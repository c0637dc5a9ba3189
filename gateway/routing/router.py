"""Which workers serve a request. Pure decisions over what is known now: no I/O, no torch; the simulator runs them.

Prefill: the fewest tokens to compute before this prompt is done (its own uncached ones and those queued).
Decode: prefix overlap, room in the batch and free blocks, in that order of weight. A worker that computes the prompt
itself: as for prefill, and few sequences whose tokens come between.
"""

from collections.abc import Collection, Mapping

import numpy as np

from core.block_hash import HASH_BLOCK_TOKENS
from core.ids import Epoch, WorkerId
from core.worker import WorkerRecord
from gateway.routing.worker_table import Column, WorkerTable

Overlap = Mapping[Epoch, int]
"""Leading hash blocks of the prompt that a worker is believed to hold."""

NOBODY: Collection[WorkerId] = frozenset()
MAX_DECODE = 8
"""Decode workers that one attempt asks at most."""

FULL, AVOIDED = 1.0, 2.0
"""Costs are below 1: taken when there is nobody else, and last of all."""

SEQUENCE_TOKENS = 32
"""A running sequence holds up a prompt on the same worker like so many of its tokens."""

TYPICAL_TOKENS = 4096.0
FAR, PREFILL_NAME_TIE = 1e12, 1e-6
FREE_TIE, NAME_TIE = 1e-7, 1e-12
"""Of equal costs the one with the larger free part of its pool, then by name."""


def choose_prefill(
    table: WorkerTable, num_tokens: int, overlap: Overlap, avoid: Collection[WorkerId] = NOBODY
) -> WorkerRecord | None:
    """The prefill worker that would finish `num_tokens` first, one of `avoid` only if there is no other; None when no
    pool is large enough."""
    if not table.rows:
        return None
    cost = table.column("ahead") + PREFILL_NAME_TIE * table.order
    _credit(cost, table, num_tokens, overlap, 1.0)
    _avoid(cost, table, avoid, FAR)
    cost[~_fits(table, num_tokens)] = np.inf
    best = int(cost.argmin())
    return table.rows[best].record if cost[best] < np.inf else None


def rank_decode(
    table: WorkerTable,
    num_tokens: int,
    max_len: int,
    overlap: Overlap,
    avoid: Collection[WorkerId] = NOBODY,
    is_local: bool = False,
) -> list[WorkerRecord]:
    """Decode workers for a prompt of `num_tokens`, the best first, those of `avoid` last, MAX_DECODE at most; only
    those whose pool holds `max_len` tokens, what it may become. `is_local`: it is to be computed there."""
    if not table.rows:
        return []
    if is_local:
        ahead = table.column("ahead") + SEQUENCE_TOKENS * table.column("sequences")
        cost = (ahead + num_tokens) / TYPICAL_TOKENS
        _credit(cost, table, num_tokens, overlap, 1.0 / TYPICAL_TOKENS)
    else:
        cost = table.column("share") + 0.5
        _credit(cost, table, num_tokens, overlap, 0.5 / num_tokens)
    cost /= 1.0 + cost
    num_blocks = -(-(num_tokens + 1) // table.block_size)
    is_full = (table.column("share") >= 1.0) | (table.column("free_blocks") < num_blocks)
    cost += NAME_TIE * table.order - FREE_TIE * table.column("room")
    cost[is_full] += FULL
    _avoid(cost, table, avoid, AVOIDED)
    cost[~_fits(table, max_len)] = np.inf
    return [table.rows[slot].record for slot in _least(cost, MAX_DECODE)]


def cached_tokens(record: WorkerRecord, num_tokens: int, overlap: Overlap) -> int:
    """Leading tokens of a prompt of `num_tokens` that this worker is believed to hold."""
    return min(overlap.get(record.epoch, 0) * HASH_BLOCK_TOKENS, num_tokens)


def _fits(table: WorkerTable, num_tokens: int) -> np.ndarray:
    return (table.column("is_open") > 0) & (table.column("pool_tokens") >= num_tokens)


def _credit(cost: Column, table: WorkerTable, num_tokens: int, overlap: Overlap, weight: float) -> None:
    """Those that hold some of the prompt cost less by that."""
    for epoch in overlap:
        row = table.by_epoch.get(epoch)
        if row is not None and row.slot is not None:
            cost[row.slot] -= weight * cached_tokens(row.record, num_tokens, overlap)


def _avoid(cost: Column, table: WorkerTable, avoid: Collection[WorkerId], penalty: float) -> None:
    if avoid:
        for row in table.rows:
            if row.record.worker_id in avoid and row.slot is not None:
                cost[row.slot] += penalty


def _least(cost: Column, count: int) -> list[int]:
    """The `count` slots that cost least, in that order; none that cost infinitely much."""
    nearest = np.argpartition(cost, count)[:count] if len(cost) > count else np.arange(len(cost))
    ordered = nearest[np.argsort(cost[nearest])]
    return [int(slot) for slot in ordered if cost[slot] < np.inf]
