"""Grants cannot be changed by those who carry them; seals say exactly what crossed."""

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from core.grant import Grant, GrantSigner, RunDigest, Seal
from core.ids import BlockHash, BlockId, Epoch, HandoffId, RequestId, WorkerId

SIGNER = GrantSigner()
SMALL = st.integers(0, 3)
FIELDS = {
    "handoff_id": st.builds(HandoffId, st.sampled_from(["a", "ab", "b", ""]).map(RequestId), SMALL),
    "worker_id": st.sampled_from(["w", "b", "", "w0"]).map(WorkerId),
    "epoch": st.integers(0, 2**63 - 1).map(Epoch),
    "num_prompt_tokens": SMALL,
    "num_cached_tokens": SMALL,
    "block_ids": st.lists(SMALL.map(BlockId), max_size=3).map(tuple),
    "addresses": st.lists(st.sampled_from(["", "tcp://a", "tcp://ab", "b"]), max_size=3).map(tuple),
}
GRANTS = st.builds(Grant, **FIELDS)


@given(GRANTS)
def test_a_signed_grant_verifies(grant):
    assert SIGNER.verify(SIGNER.sign(grant))


@given(GRANTS, st.data())
def test_a_change_of_any_field_does_not_verify(grant, data):
    signed = SIGNER.sign(grant)
    name = data.draw(st.sampled_from(sorted(FIELDS)))
    value = data.draw(FIELDS[name])
    assume(value != getattr(grant, name))
    assert not SIGNER.verify(replace(signed, **{name: value}))


@given(GRANTS, GRANTS)
def test_two_grants_have_one_mac_only_when_they_are_equal(one, other):
    assert (SIGNER.mac(one) == SIGNER.mac(other)) == (one == other)


@given(GRANTS, st.binary(max_size=40))
def test_a_made_up_mac_does_not_verify(grant, mac):
    assume(mac != SIGNER.mac(grant))
    assert not SIGNER.verify(replace(grant, mac=mac))


@given(GRANTS)
def test_another_incarnation_does_not_verify(grant):
    assert not GrantSigner().verify(SIGNER.sign(grant))


def seal_of(runs: list[tuple[int, int]]) -> Seal:
    digests = tuple(RunDigest(position, num_blocks, bytes(16)) for position, num_blocks in runs)
    handoff_id = HandoffId(RequestId("r"), 1)
    return Seal(handoff_id, WorkerId("p"), Epoch(1), Epoch(2), 9, BlockHash(b""), (), digests)


@given(st.lists(st.tuples(st.integers(-1, 6), st.integers(-1, 4)), max_size=5), st.integers(0, 7))
def test_a_seal_covers_a_grant_when_each_block_is_in_exactly_one_run(runs, num_blocks):
    covered = [block for position, count in runs for block in range(position, position + count)]
    is_tiled = sorted(covered) == list(range(num_blocks)) and all(count > 0 for _, count in runs)
    assert seal_of(runs).covers(num_blocks) == is_tiled


def test_without_runs_only_a_grant_of_nothing_is_covered():
    assert seal_of([]).covers(0)
    assert not seal_of([]).covers(1)
