"""Products with 4- and 8-bit weights against what the weights mean, and GGUF's own reading of them."""

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from kernels.cpu import bodies as native
from kernels.cpu.matrix import PackedMatrix
from kernels.quantized import GROUP, QuantizedKind, QuantizedWeight, concatenated

needs_native = pytest.mark.skipif(not native.can_run(torch.empty(0)), reason="no C++ compiler")
SHAPES = pytest.mark.parametrize(("rows", "columns"), [(16, 32), (100, 64), (7, 96), (960, 576)])
KINDS = pytest.mark.parametrize("kind", QuantizedKind)


def random_weight(kind, rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, columns // GROUP)
    blocks = torch.randint(0, 256, (*shape, kind.group_bytes), dtype=torch.uint8, generator=generator)

    def halves(low, high):
        values = torch.rand(shape, generator=generator) * (high - low) + low
        return values.half().unsqueeze(-1).view(torch.uint8)

    blocks[..., :2] = halves(-0.01, 0.01)
    if kind is QuantizedKind.Q4_1:
        blocks[..., 2:4] = halves(-0.05, 0.05)
    return QuantizedWeight(blocks.view(rows, -1), kind)


@KINDS
@SHAPES
def test_the_values_are_those_that_gguf_reads(kind, rows, columns):
    weight = random_weight(kind, rows, columns)
    theirs = dequantize(weight.blocks.numpy(), GGMLQuantizationType[kind.name])
    np.testing.assert_array_equal(weight.dequantize().numpy(), theirs)


@needs_native
@KINDS
@SHAPES
def test_packed_rows_are_the_weights_rows_to_the_bit(kind, rows, columns):
    weight = random_weight(kind, rows, columns)
    ids = torch.tensor([rows - 1, 0, rows // 2])
    assert torch.equal(PackedMatrix(weight).rows(ids), weight.dequantize()[ids])


@needs_native
def test_scales_at_the_edges_of_their_type_are_kept():
    weight = random_weight(QuantizedKind.Q4_0, 16, 32)
    edges = [0.0, -0.0, 2.0**-24, -(2.0**-24), 1023 * 2.0**-24, 2.0**-14, -(2.0**-15), 1.5, -7.5, 8000.0]
    scales = torch.tensor([*edges, *([0.25] * 6)]).half()
    weight.blocks[:, :2] = scales.unsqueeze(-1).view(torch.uint8)
    expected = weight.dequantize()
    assert torch.equal(PackedMatrix(weight).rows(torch.arange(16)), expected)


@needs_native
@KINDS
@pytest.mark.parametrize("has_bias", [False, True])
@SHAPES
def test_a_product_is_that_of_the_dense_weights(kind, rows, columns, has_bias):
    weight, bias = random_weight(kind, rows, columns), torch.randn(rows) if has_bias else None
    matrix, dense = PackedMatrix(weight, bias), weight.dequantize()
    for batch in (1, 2, 3, 5, 8, 40):
        x = torch.randn(batch, columns)
        x[:, 3] *= 50.0  # a large one beside small ones
        expected = torch.nn.functional.linear(x, dense, bias)
        tolerance = 5e-4 * float(expected.abs().max())
        torch.testing.assert_close(matrix.multiply(x), expected, rtol=1e-4, atol=tolerance)


@needs_native
@KINDS
def test_a_row_does_not_depend_on_its_batch(kind):
    matrix = PackedMatrix(random_weight(kind, 100, 576))
    x = torch.randn(600, 576)
    whole = matrix.multiply(x)
    for start, end in ((0, 1), (17, 18), (3, 5), (3, 9), (100, 112), (250, 263), (599, 600), (37, 590)):
        assert torch.equal(matrix.multiply(x[start:end].contiguous()), whole[start:end]), (start, end)


@needs_native
@KINDS
def test_extreme_inputs_stay_finite(kind):
    matrix = PackedMatrix(random_weight(kind, 32, 64))
    x = torch.zeros(4, 64)
    x[1], x[2], x[3, 5] = 1e30, 1e-38, -3e4
    assert torch.isfinite(matrix.multiply(x)).all()
    assert not matrix.multiply(x)[0].any()


@needs_native
@KINDS
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_does_not_become_a_number(kind, value):
    matrix = PackedMatrix(random_weight(kind, 32, 64))
    x = torch.randn(3, 64)
    x[1, 40] = value
    result = matrix.multiply(x)
    assert not torch.isfinite(result[1]).any()
    assert torch.isfinite(result[[0, 2]]).all()


@KINDS
def test_parts_below_one_another(kind):
    parts = [random_weight(kind, rows, 64, seed) for seed, rows in enumerate((5, 17, 2))]
    whole = concatenated(parts)
    assert whole.shape == (24, 64)
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))
