"""Small host arrays to a device in one copy. Knows nothing of what they mean.

    buffer of bytes   [ array 0 .. | array 1 .... | array 2 ]     each from a multiple of ALIGNMENT on

The host's side is pinned on CUDA, so that the copy runs while the host goes on; torch keeps a pinned buffer until the
copies out of it are done.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 16


class Layout:
    """Where tensors of these types and shapes lie in one buffer."""

    def __init__(self, parts: Sequence[tuple[torch.dtype, Sequence[int]]]) -> None:
        self._parts = parts
        self._starts = []
        self.num_bytes = 0
        for dtype, shape in parts:
            self._starts.append(self.num_bytes)
            self.num_bytes += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The parts of a buffer [num_bytes] uint8, wherever it is."""
        return [
            buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)
            for (dtype, shape), start in zip(self._parts, self._starts, strict=True)
        ]


def host_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """[num_bytes] uint8 from which copies to the device need not wait for one another."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def stage(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The same tensors on the device."""
    layout = Layout([(part.dtype, part.shape) for part in parts])
    buffer = host_buffer(layout.num_bytes, device)
    for view, part in zip(layout.views(buffer), parts, strict=True):
        view.copy_(part)
    return layout.views(buffer.to(device, non_blocking=True))
