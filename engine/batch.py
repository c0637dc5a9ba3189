"""One forward pass's inputs as flat tensors. Knows nothing of scheduling, models or where blocks come from.

Sequences lie back to back; each contributes the tokens that this step computes:

    token_ids     [ a3 a4 a5 | b9 | c0 c1 ]        a: chunk of a prompt, b: a decode step, c: a new prompt
    query_starts  [ 0          3    4      6 ]
    positions     [ 3  4  5  | 9  | 0  1  ]
    context_lens  [ 6          10   2 ]             cached + new
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]


class BatchEntry(NamedTuple):
    """What one sequence adds to a batch: `token_ids` at positions from `start_position` on, whose K and V go to
    `block_ids` (those of the whole sequence, from position 0). `num_logits`: of the last so many of these tokens.
    An `array.array("i")` or ndarray as `block_ids` is copied by memcpy, a list is converted item by item."""

    token_ids: Sequence[int]
    start_position: int
    block_ids: Sequence[int] | npt.NDArray[np.int32]
    num_logits: int


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of S sequences, R of which want logits. Every tensor is on the model's device."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64: block_id * block_size + offset, where the token's K and V are written
    query_starts: Tensor  # [S+1] int32: sequence s owns tokens query_starts[s]:query_starts[s+1]
    context_lens: Tensor  # [S] int32: tokens of the sequence after this step
    block_tables: Tensor  # [S, max_blocks] int32, padded with 0
    logit_rows: Tensor  # [R] int64: rows of [T]


def build_batch(
    entries: Sequence[BatchEntry], block_size: int, device: torch.device | str = "cpu"
) -> ForwardBatch:
    """Every entry has at least one token and blocks for all its positions. Costs one small numpy copy a sequence."""
    assert entries, "a batch has at least one sequence"
    lens = np.fromiter((len(entry.token_ids) for entry in entries), np.int64, len(entries))
    starts = np.fromiter((entry.start_position for entry in entries), np.int64, len(entries))
    assert lens.min() > 0, "a sequence in a batch has at least one token"
    query_starts = np.zeros(len(entries) + 1, np.int64)
    np.cumsum(lens, out=query_starts[1:])
    num_tokens = int(query_starts[-1])
    token_ids = np.fromiter(chain.from_iterable(entry.token_ids for entry in entries), np.int64, num_tokens)
    positions = np.arange(num_tokens) - np.repeat(query_starts[:-1] - starts, lens)
    tables = _block_tables(entries, starts + lens, block_size)
    owner = np.repeat(np.arange(len(entries)), lens)
    slots = tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
    num_logits = np.fromiter((entry.num_logits for entry in entries), np.int64, len(entries))

    def put(array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return ForwardBatch(
        token_ids=put(token_ids),
        positions=put(positions),
        slot_mapping=put(slots),
        query_starts=put(query_starts.astype(np.int32)),
        context_lens=put((starts + lens).astype(np.int32)),
        block_tables=put(tables),
        logit_rows=put(np.flatnonzero(positions >= np.repeat(starts + lens - num_logits, lens))),
    )


def _block_tables(
    entries: Sequence[BatchEntry], context_lens: IntArray, block_size: int
) -> npt.NDArray[np.int32]:
    widths = -(-context_lens // block_size)
    tables = np.zeros((len(entries), int(widths.max())), np.int32)
    for row, entry, width in zip(tables, entries, widths.tolist(), strict=True):
        assert len(entry.block_ids) >= width, (len(entry.block_ids), width)
        row[:width] = np.asarray(entry.block_ids, np.int32)[:width]
    return tables
