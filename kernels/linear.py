"""Matrix products with weights prepared once. Knows nothing of models.

`make_linear` picks the body by where the weight is and in what type; a body owns its copy of the weight.
"""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu import bodies as native
from kernels.cpu.matrix import PackedMatrix
from kernels.quantized import QuantizedWeight

ROW_TILE = 16


class Linear(ABC):
    """y = x W^T + b for W [out_features, in_features]."""

    out_features: int
    in_features: int

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in_features] contiguous -> [T, out_features]."""

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Rows of W: ids [T] int64 -> [T, in_features]; what an embedding tied to a head needs."""


class TorchLinear(Linear):
    """torch's own product: results may depend on the shape of the batch."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._weight)


class TiledLinear(TorchLinear):
    """torch's product on tiles of exactly ROW_TILE rows, so that a row's result never depends on its neighbours."""

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -num_rows % ROW_TILE))
        tiles = [F.linear(tile, self._weight, self._bias) for tile in torch.split(padded, ROW_TILE)]
        return torch.cat(tiles)[:num_rows]


class PackedLinear(Linear):
    """The native product on a CPU: every output one chain over k, the same in any batch."""

    def __init__(self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.matrix = PackedMatrix(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.matrix.multiply(x.float()).to(x.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        return self.matrix.rows(ids)


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Takes the weight over: the caller lets go of it."""
    is_float = weight.device.type == "cpu" and weight.dtype is torch.float32
    if native.can_run(weight) and (is_float or weight.shape[1] % 2 == 0):
        return PackedLinear(weight, bias)
    return TiledLinear(weight, bias) if is_float else TorchLinear(weight, bias)
