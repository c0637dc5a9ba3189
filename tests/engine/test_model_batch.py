"""Building a forward batch from sequences."""

from array import array

import numpy as np
import pytest
import torch

from engine.batch import BatchEntry, build_batch


def test_sequences_lie_back_to_back():
    batch = build_batch(
        [
            BatchEntry([5, 6, 7], 3, [9, 4], True),
            BatchEntry([8], 9, array("i", [1, 2, 7]), False),
            BatchEntry((1, 2), 0, np.array([3, 11], np.int32), True),
        ],
        block_size=4,
    )
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 1, 2]
    assert batch.positions.tolist() == [3, 4, 5, 9, 0, 1]
    assert batch.query_starts.tolist() == [0, 3, 4, 6]
    assert batch.context_lens.tolist() == [6, 10, 2]
    assert batch.slot_mapping.tolist() == [9 * 4 + 3, 4 * 4, 4 * 4 + 1, 7 * 4 + 1, 12, 13]
    assert batch.block_tables.tolist() == [[9, 4, 0], [1, 2, 7], [3, 0, 0]]
    assert batch.logit_rows.tolist() == [2, 5]


def test_types_are_what_kernels_take():
    batch = build_batch([BatchEntry([1], 0, [2], True)], 16)
    wide = (batch.token_ids, batch.positions, batch.slot_mapping, batch.logit_rows)
    narrow = (batch.query_starts, batch.context_lens, batch.block_tables)
    assert {part.dtype for part in wide} == {torch.int64}
    assert {part.dtype for part in narrow} == {torch.int32}


def test_slots_past_32_bits_do_not_wrap():
    batch = build_batch([BatchEntry([1], 31, [0, 2**28], True)], 16)
    assert batch.slot_mapping.tolist() == [2**32 + 15]


def test_a_sequence_without_blocks_for_its_tokens_is_a_bug():
    with pytest.raises(AssertionError):
        build_batch([BatchEntry([1, 2], 15, [0], True)], 16)
