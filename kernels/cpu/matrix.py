"""Weights in the form that native products read. Knows nothing of models."""

from ctypes import POINTER, byref, c_int64, c_void_p

import torch
from torch import Tensor

from kernels.cpu.library import Matrix, exported, function
from kernels.quantized import GROUP, QuantizedKind, QuantizedWeight

LANES = 16
_KINDS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    QuantizedKind.Q4_0: 2,
    QuantizedKind.Q4_1: 2,
    QuantizedKind.Q8_0: 3,
}
"""`MatrixKind` in matrix.h."""

_ON_ROWS = (POINTER(Matrix), c_void_p, c_void_p, c_int64)


class PackedMatrix:
    """A weight [N, K] and its bias; `struct` points into it. Takes float32, bfloat16 (K even) and quantised ones."""

    def __init__(self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> None:
        self.num_rows, self.width = weight.shape
        self._kind = _KINDS[weight.dtype if isinstance(weight, Tensor) else weight.kind]
        self._packed = _packed(weight) if isinstance(weight, Tensor) else _packed_groups(weight, self._kind)
        self._bias = None if bias is None else bias.float().contiguous()
        bias_at = None if self._bias is None else self._bias.data_ptr()
        self.struct = Matrix(self._packed.data_ptr(), bias_at, self.num_rows, self.width, self._kind)

    @property
    def num_bytes(self) -> int:
        """What a product reads of it."""
        return self._packed.numel() * self._packed.element_size()

    def multiply(self, x: Tensor) -> Tensor:
        """x [M, K] float32, contiguous -> [M, N] float32. A row's result does not depend on the others."""
        assert x.shape[1] == self.width and x.is_contiguous() and x.dtype is torch.float32, (x.shape, x.dtype)
        output = torch.empty(x.shape[0], self.num_rows)
        exported("linear", _ON_ROWS)(byref(self.struct), x.data_ptr(), output.data_ptr(), x.shape[0])
        return output

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight: ids [T] int64 -> [T, K] float32."""
        output = torch.empty(len(ids), self.width)
        exported("read_rows", _ON_ROWS)(
            byref(self.struct), ids.contiguous().data_ptr(), output.data_ptr(), len(ids)
        )
        return output


def _packed(weight: Tensor) -> Tensor:
    num_rows, width = weight.shape
    packed = torch.empty(-(-num_rows // LANES), width * LANES, dtype=weight.dtype)
    function("pack", weight.dtype)(weight.contiguous().data_ptr(), packed.data_ptr(), num_rows, width)
    return packed


def _packed_groups(weight: QuantizedWeight, kind: int) -> Tensor:
    num_rows, width = weight.shape
    group_bytes = exported("packed_group_bytes", (c_int64,), c_int64)(kind)
    packed = torch.empty(-(-num_rows // LANES), width // GROUP * group_bytes, dtype=torch.uint8)
    blocks = weight.blocks.contiguous()
    arguments = (blocks.data_ptr(), packed.data_ptr(), num_rows, width)
    if weight.kind is QuantizedKind.Q8_0:
        exported("pack_q8", (c_void_p, c_void_p, c_int64, c_int64))(*arguments)
    else:
        pack = exported("pack_q4", (c_void_p, c_void_p, c_int64, c_int64, c_int64))
        pack(*arguments, weight.kind is QuantizedKind.Q4_1)
    return packed
