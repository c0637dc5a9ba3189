"""The Triton bodies against the reference. Not collected by itself: test_triton.py runs it in a process of its own,
under the interpreter where there is no GPU."""

import numpy as np
import pytest
import torch

from core.sampling import SamplingParams
from engine.device_sampler import sample_on_device
from engine.logit_rules import LogitRules, RuledRow
from engine.sampler import SamplingBatch, SamplingRow, sample
from kernels import reference, triton_blocks, triton_bodies
from kernels.layouts import PADDING_SLOT, Caches, Ragged, Rope, TokenSlots
from kernels.triton_runtime import IS_INTERPRETED

DEVICE = "cpu" if IS_INTERPRETED else "cuda"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
RAGGED = {
    "one": [(0, 1)],
    "edges": [(0, 15), (0, 16), (0, 17), (14, 1), (15, 1), (16, 1), (32, 1)],
    "chunks": [(0, 33), (7, 9), (31, 5), (40, 1)],
    "tiles": [(0, 70), (60, 7), (90, 1)],
    "steps": [(0, 1), (14, 1), (15, 1), (16, 1), (90, 1)],
}
SPLITS = [(0, 1), (254, 1), (255, 1), (256, 1), (4199, 1), (600, 1)]
"""Decode steps about the ends of splits, one with more of them than are merged at a time."""


def moved(part):
    if isinstance(part, torch.Tensor):
        return part.to(DEVICE)
    if isinstance(part, Caches | Ragged | Rope | TokenSlots):
        return type(part)(*(moved(item) for item in part))
    return part


def assert_same(actual, expected):
    """To the bit on a GPU; the interpreter's products are numpy's, whose sums may depend on where operands lie."""
    tolerance = 0.0 if actual.is_cuda else 1e-6
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@DTYPES
@pytest.mark.parametrize("lens", RAGGED.values(), ids=RAGGED)
@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((4, 2), 128), ((2, 2), 24)])
def test_attention(attention_case, near, lens, heads, head_dim, dtype):
    case = attention_case(lens, heads, head_dim, dtype=dtype)
    actual = triton_bodies.paged_attention(*(moved(part) for part in case))
    near(actual.cpu(), reference.paged_attention(*case))


def test_attention_over_blocks_that_are_no_power_of_two(attention_case, near):
    case = attention_case([(10, 40), (90, 1)], block_size=20)
    near(
        triton_bodies.paged_attention(*(moved(part) for part in case)).cpu(), reference.paged_attention(*case)
    )


@DTYPES
@pytest.mark.parametrize(("heads", "head_dim"), [((2, 1), 64), ((3, 1), 24)])
def test_decode_attention_over_many_splits(attention_case, near, heads, head_dim, dtype):
    case = attention_case(SPLITS, heads, head_dim, dtype=dtype)
    for seq, (cached, _) in enumerate(SPLITS):  # the last keys weigh most: what came before must decay
        case.caches.k[case.ragged.block_tables[seq, cached // 16]] *= 4
    actual = triton_bodies.paged_attention(*(moved(part) for part in case))
    near(actual.cpu(), reference.paged_attention(*case))


def test_a_decode_step_is_the_same_in_any_batch_and_under_any_table(attention_case):
    query, caches, ragged, scale = attention_case(SPLITS, (2, 1))
    whole = triton_bodies.paged_attention(*(moved(part) for part in (query, caches, ragged, scale)))
    for seq, (cached, _) in enumerate(SPLITS):
        table = ragged.block_tables[seq : seq + 1, : cached // 16 + 1].contiguous()
        own = Ragged(ragged.query_starts[:2], ragged.context_lens[seq : seq + 1], table)
        parts = (query[seq : seq + 1], caches, own, scale)
        assert_same(triton_bodies.paged_attention(*(moved(part) for part in parts)), whole[seq : seq + 1])


def test_a_row_of_padding_attends_to_nothing(attention_case, near):
    query, caches, ragged, scale = attention_case([(40, 1), (300, 1)], (4, 2))
    ragged = ragged._replace(context_lens=torch.tensor([41, 0], dtype=torch.int32))
    actual = triton_bodies.paged_attention(*(moved(part) for part in (query, caches, ragged, scale)))
    near(actual.cpu(), reference.paged_attention(query, caches, ragged, scale))
    assert not actual[1].any()


def test_a_row_is_the_same_in_any_chunking(attention_case):
    query, caches, ragged, scale = attention_case([(0, 50)])
    whole = triton_bodies.paged_attention(*(moved(part) for part in (query, caches, ragged, scale)))
    chunk = Ragged(torch.tensor([0, 13], dtype=torch.int32), ragged.context_lens, ragged.block_tables)
    part = triton_bodies.paged_attention(*(moved(item) for item in (query[-13:], caches, chunk, scale)))
    assert_same(part, whole[-13:])


@DTYPES
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("num_tokens", "head_dim"), [(1, 64), (5, 128), (7, 24)])
def test_rope_and_cache(rope_case, near, num_tokens, head_dim, has_norm, dtype):
    expected, actual = (rope_case(num_tokens, (9, 3), head_dim, dtype, has_norm) for _ in range(2))
    actual_parts = [moved(part) for part in actual]
    near(triton_bodies.rope_and_cache(*actual_parts).cpu(), reference.rope_and_cache(*expected))
    for written, wanted in zip(actual_parts[-1], expected.caches, strict=True):
        near(written.cpu(), wanted)


def test_a_row_of_padding_is_stored_nowhere(rope_case, near):
    expected, actual = (rope_case(5) for _ in range(2))
    for case in (expected, actual):
        case.slots.slot_mapping[2] = PADDING_SLOT
    parts = [moved(part) for part in actual]
    near(triton_bodies.rope_and_cache(*parts).cpu(), reference.rope_and_cache(*expected))
    for written, wanted in zip(parts[-1], expected.caches, strict=True):
        near(written.cpu(), wanted)
        assert (~wanted.isnan()).sum() == 4 * 3 * 64


@DTYPES
@pytest.mark.parametrize("shape", [(1, 576), (5, 64), (3, 100)])
def test_norms(near, shape, dtype):
    x, residual = (torch.randn(shape).to(dtype) for _ in range(2))
    weight = torch.randn(shape[1]).to(dtype)
    near(triton_bodies.rms_norm(moved(x), moved(weight), 1e-5).cpu(), reference.rms_norm(x, weight, 1e-5))
    actual_residual, expected_residual = moved(residual.clone()), residual.clone()
    actual = triton_bodies.add_rms_norm(moved(x), actual_residual, moved(weight), 1e-5)
    near(actual.cpu(), reference.add_rms_norm(x, expected_residual, weight, 1e-5))
    near(actual_residual.cpu(), expected_residual)  # the interpreter truncates to bfloat16


@DTYPES
def test_silu_mul(near, dtype):
    gate_up = (4 * torch.randn(3, 2 * 1100)).to(dtype)
    near(triton_bodies.silu_mul(moved(gate_up)).cpu(), reference.silu_mul(gate_up))


VOCAB = 9000
"""More than two chunks of triton_sampling."""
VARIANTS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 40, "temperature": 1.3},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 3.0},
    {"top_p": 0.3, "top_k": 500, "temperature": 5.0},
    {"top_p": 1e-9},
    {"top_k": VOCAB + 5},
    {"top_k": VOCAB - 1, "top_p": 0.99, "temperature": 100.0},
]


def sampling_batch(num_rows, seed=0):
    rows = [
        (SamplingParams(1, **VARIANTS[row % len(VARIANTS)]), seed + row, 3 * row) for row in range(num_rows)
    ]
    return SamplingBatch.build(rows)


def assert_draws_are_those_of_the_sampler(logits, requests):
    actual, expected = sample_on_device(moved(logits), requests), sample(logits, requests)
    assert actual.is_finite.tolist() == expected.is_finite.tolist()
    assert actual.token_ids.tolist() == expected.token_ids.tolist()
    finite = expected.is_finite
    np.testing.assert_allclose(actual.logprobs[finite], expected.logprobs[finite], rtol=1e-5, atol=1e-5)
    assert actual.is_possible.tolist() == expected.is_possible.tolist()
    assert [part.dtype for part in actual[:-1]] == [part.dtype for part in expected[:-1]]
    assert actual.tops.keys() == expected.tops.keys()
    for row, top in expected.tops.items():
        assert [token for token, _ in actual.tops[row]] == [token for token, _ in top]


def test_draws():
    logits = torch.randn(len(VARIANTS), VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    assert_draws_are_those_of_the_sampler(logits, sampling_batch(len(VARIANTS), 2**64 - 4))


RULES = [
    {"min_p": 0.3, "num_logprobs": 3},
    {"repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": 1.0, "temperature": 0.0},
    {"logit_bias": ((4, 3.0), (9, -100.0)), "top_k": 5},
    {"allowed_token_ids": (1, 5, 9), "bad_words": ((9, 5), (1,)), "top_p": 0.9},
    {"allowed_token_ids": (1,), "bad_words": ((1,),)},
    {"stop_token_ids": (2, 3), "min_tokens": 9},
]


def test_draws_from_changed_logits():
    rows = []
    for index, values in enumerate([*RULES, {}, *RULES]):
        params = SamplingParams(1, **values)
        ruled = RuledRow(LogitRules(params), [7, 4, 9, 9], 2) if values else None
        rows.append(SamplingRow(params, index, 2, ruled))
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(5)) * 3
    with np.errstate(invalid="ignore"):  # in the interpreter
        assert_draws_are_those_of_the_sampler(logits, SamplingBatch.build(rows))


def test_draws_of_ties():
    """Few distinct values: limits fall among equals, which all stay allowed; greedy takes the first."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randint(0, 6, (len(VARIANTS), VOCAB), generator=generator).float()
    logits[::3, 5:] = -torch.inf
    assert_draws_are_those_of_the_sampler(logits, sampling_batch(len(VARIANTS)))


def test_draws_from_rows_that_are_not_finite():
    logits = torch.randn(4, 8, 50, generator=torch.Generator().manual_seed(4))
    logits[1, :, 7] = torch.nan
    logits[2, :, 7] = torch.inf
    logits[3] = -torch.inf
    with np.errstate(invalid="ignore"):  # in the interpreter
        assert_draws_are_those_of_the_sampler(logits.flatten(0, 1), sampling_batch(32))


def test_noise_is_that_of_every_other_body():
    """Equal logits: the noise alone decides."""
    rows = SamplingBatch.build([(SamplingParams(1), 11, position) for position in range(150)])
    assert_draws_are_those_of_the_sampler(torch.zeros(150, 300), rows)


def make_pool(dtype, num_blocks=9):
    """Blocks of more than one chunk and an odd size; NaN and infinities among the values."""
    pool = torch.randn(num_blocks, 2, 3, 433, generator=torch.Generator().manual_seed(7)).to(dtype)
    pool[4, 0, 0, :3] = torch.tensor([torch.nan, torch.inf, -0.0]).to(dtype)
    return pool


def bits(values):
    return values.contiguous().view(torch.uint8).cpu()


@DTYPES
@pytest.mark.parametrize("ids", [[4], [8, 0, 4, 3], list(range(9))], ids=len)
def test_blocks_are_gathered_and_scattered(ids, dtype):
    pool, block_ids = make_pool(dtype), torch.tensor(ids)
    expected = torch.empty_like(pool[: len(ids)])
    reference.gather_blocks(pool, block_ids, expected)
    staging = moved(torch.zeros_like(expected))
    triton_blocks.gather_blocks(moved(pool), moved(block_ids), staging)
    assert torch.equal(bits(staging), bits(expected))
    assert torch.equal(bits(expected), bits(torch.stack([pool[block] for block in ids])))

    target, wanted = moved(torch.zeros_like(pool)), torch.zeros_like(pool)
    triton_blocks.scatter_blocks(staging, moved(block_ids), target)
    reference.scatter_blocks(expected, block_ids, wanted)
    assert torch.equal(bits(target), bits(wanted))
    assert torch.equal(bits(wanted[ids]), bits(pool[ids]))
    assert not wanted[[block for block in range(9) if block not in ids]].any()
