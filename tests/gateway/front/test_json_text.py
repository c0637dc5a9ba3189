"""Written in pieces, JSON is the same text as written at once."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.front.json_text import PIECE_LEN, compact_json, large_json

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner, max_size=2).map(lambda few: few * PIECE_LEN)
        | st.dictionaries(st.text(max_size=3), inner)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_pieces_make_the_same_text(value):
    assert large_json(value) == compact_json(value)


@pytest.mark.parametrize("length", [0, 1, PIECE_LEN - 1, PIECE_LEN, PIECE_LEN + 1, 3 * PIECE_LEN])
def test_lists_of_any_length_around_a_piece(length):
    value = {"top": [{"a": index, "é": [index]} for index in range(length)], "n": list(range(length))}
    assert large_json(value) == compact_json(value)
    assert json.loads(large_json(value)) == value
