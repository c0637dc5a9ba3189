"""Weights in groups of 32 values of 4 or 8 bits, as GGUF stores them, and what they mean. Knows nothing of files.

Q4_0   d float16, 16 bytes: values 0..15 in the low halves, 16..31 in the high ones     w = d (q - 8)
Q4_1   d, m float16, 16 bytes likewise                                                 w = d q + m
Q8_0   d float16, 32 signed bytes                                                      w = d q
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

GROUP = 32


class QuantizedKind(StrEnum):
    Q4_0 = "q4_0"
    Q4_1 = "q4_1"
    Q8_0 = "q8_0"

    @property
    def group_bytes(self) -> int:
        return {QuantizedKind.Q4_0: 18, QuantizedKind.Q4_1: 20, QuantizedKind.Q8_0: 34}[self]


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix [N, K]; `blocks` [N, K / 32 * group_bytes] uint8, contiguous."""

    blocks: Tensor
    kind: QuantizedKind

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks.shape[0], self.blocks.shape[1] // self.kind.group_bytes * GROUP

    def dequantize(self) -> Tensor:
        """[N, K] float32: the reference for every product."""
        rows, width = self.shape
        groups = self.blocks.view(rows, width // GROUP, self.kind.group_bytes)
        scale = _half(groups[..., :2])
        if self.kind is QuantizedKind.Q8_0:
            return (groups[..., 2:].contiguous().view(torch.int8).float() * scale).reshape(rows, width)
        has_offset = self.kind is QuantizedKind.Q4_1
        packed = groups[..., 4 if has_offset else 2 :]
        values = torch.cat((packed & 15, packed >> 4), dim=-1).float()
        if has_offset:
            return (values * scale + _half(groups[..., 2:4])).reshape(rows, width)
        return ((values - 8) * scale).reshape(rows, width)


def concatenated(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Below one another; all of one kind and width."""
    assert len({(part.kind, part.shape[1]) for part in parts}) == 1, parts
    return QuantizedWeight(torch.cat([part.blocks for part in parts]), parts[0].kind)


def _half(pairs: Tensor) -> Tensor:
    """[..., 2] bytes -> [..., 1] float32."""
    return pairs.contiguous().view(torch.float16).float()
