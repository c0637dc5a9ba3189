"""The native bodies against the reference, and both against themselves in other batches."""

import mmap

import pytest
import torch

from kernels import reference
from kernels.cpu import bodies as native
from kernels.layouts import Caches, Ragged, RowChoices, TokenSlots

pytestmark = pytest.mark.skipif(not native.can_run(torch.empty(0)), reason="no C++ compiler on this machine")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
BODIES = pytest.mark.parametrize("bodies", [native, reference], ids=["native", "reference"])
MAP_NORESERVE = 0x4000  # Linux: address space without a promise of memory
RAGGED = {
    "one": [(0, 1)],
    "edges": [(0, 1), (0, 15), (0, 16), (0, 17), (14, 1), (15, 1), (16, 1), (17, 1), (32, 1)],
    "chunks": [(0, 33), (7, 90), (31, 5), (200, 1), (1, 64)],
    "long": [(0, 300), (299, 1)],
}


@DTYPES
@pytest.mark.parametrize("lens", RAGGED.values(), ids=RAGGED)
@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((4, 2), 128), ((8, 1), 16), ((2, 2), 80)])
def test_attention(attention_case, near, lens, heads, head_dim, dtype):
    case = attention_case(lens, heads, head_dim, dtype=dtype)
    near(native.paged_attention(*case), reference.paged_attention(*case))


def test_attention_is_the_softmax_over_the_context(attention_case, near):
    query, caches, ragged, scale = attention_case([(0, 40)])
    for body in (native, reference):
        actual = body.paged_attention(query, caches, ragged, scale)
        k, v = (
            cache[ragged.block_tables[0].long()].transpose(0, 1).flatten(1, 2)[:, :40] for cache in caches
        )
        expected = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1), k.repeat_interleave(3, 0), v.repeat_interleave(3, 0), is_causal=True
        )
        near(actual, expected.transpose(0, 1))


@pytest.mark.parametrize("block_size", [1, 16, 20, 64])
def test_attention_does_not_depend_on_the_block_size(attention_case, block_size):
    query = torch.randn(71, 9, 64)

    def attend(size):
        case = attention_case([(0, 70), (45, 1)], block_size=size)
        return native.paged_attention(query, *_same_values(case, size), case.scale)

    assert torch.equal(attend(block_size), attend(32))


def _same_values(case, block_size):
    """The case's caches with contents that depend on (sequence, position) only."""
    for cache, shift in zip(case.caches, (0.0, 0.5), strict=True):
        for seq, context in enumerate(case.ragged.context_lens.tolist()):
            places = torch.arange(context)
            blocks = case.ragged.block_tables[seq, places // block_size].long()
            wave = torch.sin(places[:, None, None] * 1.7 + torch.arange(3 * 64).view(3, 64) + seq + shift)
            cache[blocks, :, places % block_size] = wave
    return case.caches, case.ragged


@BODIES
def test_a_row_is_the_same_in_any_chunking_and_batch(attention_case, bodies):
    query, caches, ragged, scale = attention_case([(0, 75), (40, 1), (3, 20)])
    whole = bodies.paged_attention(query, caches, ragged, scale)
    for end, length in ((75, 1), (75, 31), (40, 40), (33, 2), (16, 1)):
        chunk = Ragged(
            torch.tensor([0, length], dtype=torch.int32),
            torch.tensor([end], dtype=torch.int32),
            ragged.block_tables[:1].contiguous(),
        )
        part = bodies.paged_attention(query[end - length : end].contiguous(), caches, chunk, scale)
        assert torch.equal(part, whole[end - length : end]), (end, length)


def test_head_sizes_that_are_no_whole_vectors_use_the_reference(attention_case):
    case = attention_case([(0, 9), (20, 1)], (4, 2), 24)
    assert torch.equal(native.paged_attention(*case), reference.paged_attention(*case))


@DTYPES
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("num_tokens", "head_dim"), [(1, 64), (5, 128), (17, 24), (3, 16)])
def test_rope_and_cache(rope_case, near, num_tokens, head_dim, has_norm, dtype):
    actual, expected = (rope_case(num_tokens, (9, 3), head_dim, dtype, has_norm) for _ in range(2))
    near(native.rope_and_cache(*actual), reference.rope_and_cache(*expected))
    for written, wanted in zip(actual.caches, expected.caches, strict=True):
        near(written, wanted)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 576), (33, 64), (3, 100), (2, 7)])
def test_norms(near, shape, dtype):
    x, residual = (torch.randn(shape).to(dtype) for _ in range(2))
    weight = torch.randn(shape[1]).to(dtype)
    near(native.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    actual_residual, expected_residual = residual.clone(), residual.clone()
    actual = native.add_rms_norm(x, actual_residual, weight, 1e-5)
    near(actual, reference.add_rms_norm(x, expected_residual, weight, 1e-5))
    assert torch.equal(actual_residual, expected_residual)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1536), (9, 100), (4, 3)])
def test_silu_mul(near, shape, dtype):
    gate_up = (8 * torch.randn(shape[0], 2 * shape[1])).to(dtype)
    near(native.silu_mul(gate_up), reference.silu_mul(gate_up))


def test_silu_of_what_overflows_an_exponential():
    gate_up = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]])
    expected = torch.tensor([[0.0, 0.0, 0.0, 100.0, 1e4]])
    torch.testing.assert_close(native.silu_mul(gate_up), expected, rtol=0, atol=1e-30)


def test_bfloat16_conversion_keeps_nan_and_infinity():
    x = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1.0] * 8]).bfloat16()
    residual = torch.zeros_like(x)
    native.add_rms_norm(x, residual, torch.ones(32).bfloat16(), 1e-5)
    assert torch.equal(residual.isnan(), x.isnan())
    assert torch.equal(residual.nan_to_num(), x.nan_to_num())


def test_offsets_past_two_to_the_31_elements(rope_case):
    """A cache of 9 GB of address space, of which four pages are touched."""
    num_blocks, head_dim, block_size = 1_200_000, 64, 16
    elements = num_blocks * 2 * block_size * head_dim
    assert elements > 2**31
    memory = mmap.mmap(-1, elements * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    pool = torch.frombuffer(memory, dtype=torch.float32).view(num_blocks, 2, 1, block_size, head_dim)
    caches = Caches(pool[:, 0], pool[:, 1])
    qkv, rope, _, _ = rope_case(20, (3, 1))
    last = num_blocks - 1
    slots = torch.cat((torch.arange(16) + last * block_size, torch.arange(4) + 2 * block_size))
    query = native.rope_and_cache(qkv, rope, TokenSlots(torch.arange(20), slots), caches)
    assert torch.equal(caches.v[last, 0, 15], qkv[15].view(5, 64)[4])
    table = torch.tensor([[last, 2]], dtype=torch.int32)
    ragged = Ragged(torch.tensor([0, 20], dtype=torch.int32), torch.tensor([20], dtype=torch.int32), table)
    far = native.paged_attention(query, caches, ragged, 0.125)
    near_caches = Caches(caches.k[[last, 2]].clone(), caches.v[[last, 2]].clone())
    moved = ragged._replace(block_tables=torch.tensor([[0, 1]], dtype=torch.int32))
    assert torch.equal(far, native.paged_attention(query, near_caches, moved, 0.125))


def choices_of(num_rows, temperatures=(1.0,), top_ks=(0,), top_ps=(1.0,)):
    """Each list repeated over the rows."""
    keys = torch.randint(-(2**62), 2**62, (num_rows,), generator=torch.Generator().manual_seed(1))
    rows = torch.arange(num_rows)
    return RowChoices(
        torch.tensor(temperatures)[rows % len(temperatures)],
        torch.tensor(top_ks)[rows % len(top_ks)],
        torch.tensor(top_ps, dtype=torch.float64)[rows % len(top_ps)],
        keys,
    )


@pytest.mark.parametrize("width", [1, 7, 16, 1000, 49152])
@pytest.mark.parametrize("scale", [0.0, 0.1, 5.0])
def test_draw_tokens(width, scale):
    logits = torch.randn(140, width, generator=torch.Generator().manual_seed(0)) * scale
    logits[:, ::3] = -torch.inf
    logits[:, -1] = 1.0
    choices = choices_of(
        140, (0.0, 1.0, 0.5, 30.0), (0, 1, 5, 900, 10**9), (1.0, 0.9, 0.2, 1e-9, 0.999, 1.0, 0.5)
    )
    found, expected = (body.draw_tokens(logits, choices) for body in (native, reference))
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.peaks, expected.peaks)
    torch.testing.assert_close(found.totals, expected.totals, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [0.0, 3.0])
@pytest.mark.parametrize(("width", "num_tokens"), [(1, 1), (40, 40), (40, 3), (1000, 17), (49152, 20)])
def test_largest_tokens(scale, width, num_tokens):
    logits = (torch.randn(9, width, generator=torch.Generator().manual_seed(0)) * scale).round()
    logits[3] = -torch.inf
    found, expected = (body.largest_tokens(logits, num_tokens) for body in (native, reference))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("body", [native, reference])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draw_tokens_of_equals_is_the_lowest_and_what_is_not_finite_is_told(body, temperature):
    logits = torch.full((5, 100), -torch.inf)
    logits[0, 37] = logits[0, 75] = 2.0
    logits[1, 3] = torch.nan
    logits[2, 99] = torch.inf
    logits[4, 99] = -1.0
    drawn = body.draw_tokens(logits, choices_of(5, (temperature,)))
    assert drawn.tokens[0] in ([37] if temperature == 0.0 else [37, 75])
    assert drawn.tokens[1:].tolist() == [0, 0, 0, 99]
    assert torch.isfinite(drawn.peaks).tolist() == [True, False, False, False, True]
    torch.testing.assert_close(drawn.totals[[0, 4]], torch.tensor([2.0, 1.0], dtype=torch.float64))
