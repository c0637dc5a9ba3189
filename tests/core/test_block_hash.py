"""A block's hash is its identity: two different inputs must never spell the same bytes."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.block_hash import HASH_BLOCK_TOKENS, HASH_BYTES, MAX_SALT_BYTES, cache_salt, hash_block, hash_chain

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
TEXT = st.text(max_size=6)
SALT = st.binary(max_size=8)
INPUTS = st.tuples(st.binary(max_size=16), IDS, TEXT, TEXT, SALT)


@given(INPUTS, INPUTS)
def test_different_inputs_have_different_hashes(one, other):
    assert (hash_block(*one) == hash_block(*other)) == (one == other)


def test_bytes_cannot_move_from_one_field_into_its_neighbour():
    ids = list(range(16))
    spellings = {
        hash_block(b"", ids, "ab", "c"),
        hash_block(b"", ids, "a", "bc"),
        hash_block(b"", ids, "abc", ""),
        hash_block(b"", ids, "", "abc"),
        hash_block(b"", ids, "ab", "", b"c"),
        hash_block(b"abc", ids, ""),
    }
    assert len(spellings) == 6


def test_the_last_token_id_is_not_taken_for_the_fingerprint():
    assert hash_block(b"", [1, 0x61616161], "") != hash_block(b"", [1], "aaaa")


def test_five_thousand_salts_and_as_many_adapters_give_as_many_hashes():
    ids = list(range(HASH_BLOCK_TOKENS))
    salted = {hash_block(b"", ids, "model", salt=str(number).encode()) for number in range(5000)}
    adapted = {hash_block(b"", ids, "model", adapter=str(number)) for number in range(5000)}
    models = {hash_block(b"", ids, str(number)) for number in range(5000)}
    assert len(salted | adapted | models) == 15_000


@given(st.tuples(TEXT, TEXT), st.tuples(TEXT, TEXT))
def test_different_tenants_and_salts_never_share_a_block(one, other):
    keys = [hash_block(b"", range(16), "model", salt=cache_salt(*pair)) for pair in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)


def test_five_thousand_pairs_of_tenant_and_salt_give_as_many_hashes_of_one_block():
    pairs = {(f"{number // 50}", f"{number % 50}") for number in range(4800)}
    pairs |= {("", str(number)) for number in range(100)} | {(str(number), "") for number in range(96, 196)}
    assert len(pairs) == 5000
    assert len({hash_block(b"", range(16), "model", salt=cache_salt(*pair)) for pair in pairs}) == 5000


def test_characters_cannot_move_from_the_tenant_into_its_salt():
    spellings = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"), ("é", "c"), ("e", "\u0301c")]
    assert len({cache_salt(*pair) for pair in spellings}) == len(spellings)


def test_without_tenant_and_salt_there_is_none_and_any_other_can_be_hashed_with():
    assert cache_salt("", "") == b""
    assert hash_chain(range(32), "model", salt=b"") == hash_chain(range(32), "model")
    assert all(0 < len(cache_salt(*pair)) <= MAX_SALT_BYTES for pair in (("a" * 999, "b" * 999), ("", "b")))


def test_every_hash_of_a_chain_is_salted():
    ids = list(range(16 * 4))
    pairs = zip(hash_chain(ids, "model", salt=b"a"), hash_chain(ids, "model", salt=b"b"), strict=True)
    assert all(one != other for one, other in pairs)


def test_the_trick_that_collides_polynomial_hashes_does_not_collide():
    ids = list(range(100, 116))
    for index in range(15):
        other = list(ids)
        other[index] += 1
        other[index + 1] -= 31
        assert hash_block(b"", ids, "model") != hash_block(b"", other, "model")


@given(IDS, st.integers(0, 40))
def test_a_chain_of_a_prefix_is_a_prefix_of_the_chain(ids, length):
    chain = hash_chain(ids, "model")
    assert len(chain) == len(ids) // HASH_BLOCK_TOKENS
    assert hash_chain(ids[:length], "model") == chain[: min(length, len(ids)) // HASH_BLOCK_TOKENS]
    assert all(len(block) == HASH_BYTES for block in chain)


@given(st.lists(st.integers(0, 1000), min_size=48, max_size=48), st.integers(0, 47))
def test_every_block_from_a_changed_token_on_has_another_hash(ids, index):
    other = list(ids)
    other[index] += 1
    pairs = zip(hash_chain(ids, "model"), hash_chain(other, "model"), strict=True)
    assert [one == two for one, two in pairs] == [block < index // 16 for block in range(3)]


def test_equal_blocks_at_different_places_differ():
    assert len(set(hash_chain([7] * 16 * 5, "model"))) == 5


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_a_token_id_that_does_not_fit_is_refused(token_id):
    with pytest.raises(struct.error):
        hash_block(b"", [token_id], "model")
