"""Products with prepared weights: right, and in float32 the same to the bit in any batch."""

import pytest
import torch
import torch.nn.functional as F

from kernels.cpu import bodies as native
from kernels.linear import PackedLinear, TiledLinear, TorchLinear, make_linear

HAS_NATIVE = native.can_run(torch.empty(0))
BODIES = [
    pytest.param(PackedLinear, marks=pytest.mark.skipif(not HAS_NATIVE, reason="no C++ compiler")),
    TiledLinear,
]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (100, 33), (7, 5), (960, 576), (48, 1)])
def test_equals_torch(body, rows, columns, has_bias):
    weight, bias = torch.randn(rows, columns), torch.randn(rows) if has_bias else None
    linear = body(weight.clone(), bias)
    for batch in (1, 5, 7, 13, 40):
        x = torch.randn(batch, columns)
        torch.testing.assert_close(linear(x), F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)


needs_native = pytest.mark.skipif(not HAS_NATIVE, reason="no C++ compiler")


@needs_native
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (100, 34), (7, 6), (960, 576), (48, 2)])
def test_bfloat16_is_the_float_product_of_its_weights(rows, columns, has_bias):
    weight, bias = torch.randn(rows, columns).bfloat16(), torch.randn(rows) if has_bias else None
    matrix = PackedLinear(weight.clone(), bias).matrix
    for batch in (1, 2, 3, 5, 7, 8, 13, 40):
        x = torch.randn(batch, columns).bfloat16().float()
        expected = F.linear(x, weight.float(), bias)
        torch.testing.assert_close(matrix.multiply(x), expected, rtol=1e-4, atol=1e-4)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(960, 576), (576, 1536), (50, 64)])
def test_a_row_of_a_native_product_does_not_depend_on_its_batch(rows, columns, dtype):
    matrix = PackedLinear(torch.randn(rows, columns).to(dtype)).matrix
    x = torch.randn(600, columns)
    whole = matrix.multiply(x)
    for start, end in ((0, 1), (17, 18), (3, 5), (3, 9), (100, 112), (250, 263), (599, 600), (37, 590)):
        assert torch.equal(matrix.multiply(x[start:end].contiguous()), whole[start:end]), (start, end)


@pytest.mark.parametrize("body", [TiledLinear])
@pytest.mark.parametrize(("rows", "columns"), [(960, 576), (576, 1536), (50, 64)])
def test_a_row_does_not_depend_on_its_batch(body, rows, columns):
    linear = body(torch.randn(rows, columns))
    x = torch.randn(600, columns)
    whole = linear(x)
    for start, end in ((0, 1), (17, 18), (3, 9), (100, 112), (250, 263), (599, 600), (37, 590)):
        assert torch.equal(linear(x[start:end].contiguous()), whole[start:end]), (start, end)


@pytest.mark.parametrize("body", [*BODIES, TorchLinear])
def test_rows_are_the_weight_rows(body):
    weight = torch.randn(37, 21)
    ids = torch.tensor([36, 0, 16, 15, 15])
    assert torch.equal(body(weight.clone()).rows(ids), weight[ids])


@needs_native
def test_rows_of_bfloat16_are_the_weight_rows():
    weight = torch.randn(37, 22).bfloat16()
    ids = torch.tensor([36, 0, 16, 15, 15])
    assert torch.equal(PackedLinear(weight.clone()).rows(ids), weight[ids])


def test_the_body_is_picked_by_type():
    assert isinstance(make_linear(torch.randn(4, 4)), PackedLinear if HAS_NATIVE else TiledLinear)
    assert isinstance(make_linear(torch.randn(4, 4).bfloat16()), PackedLinear if HAS_NATIVE else TorchLinear)
    assert type(make_linear(torch.randn(4, 3).bfloat16())) is TorchLinear
