"""The KV cache of one rank as tensors. Knows nothing of which block belongs to whom.

data  [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]     block-major, contiguous
k_cache(layer), v_cache(layer)   [num_blocks, num_kv_heads, block_size, head_dim]     strided views of it
"""

import torch
from torch import Tensor

from core.kv_region import KVRegion
from core.kv_spec import DType, KVSpec

TORCH_DTYPES = {
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT16: torch.float16,
    DType.FLOAT32: torch.float32,
}


class KVPool:
    """Owns the tensor; over a region, the region's owner closes it after `release`."""

    def __init__(self, spec: KVSpec, data: Tensor, export: memoryview | None = None) -> None:
        shape = (spec.num_layers, 2, spec.num_kv_heads, spec.block_size, spec.head_dim)
        assert data.shape[1:] == shape and data.is_contiguous(), (data.shape, shape)
        self.spec = spec
        self.data = data
        self._export = (
            export  # torch.frombuffer keeps none: without it the memory could vanish below the tensor
        )
        self._k_caches = [data[:, layer, 0] for layer in range(spec.num_layers)]
        self._v_caches = [data[:, layer, 1] for layer in range(spec.num_layers)]

    @classmethod
    def over(cls, region: KVRegion, spec: KVSpec) -> "KVPool":
        """A view of the region's bytes, no copy. Closing the region raises BufferError until `release`."""
        assert region.block_bytes == spec.block_bytes, (region.block_bytes, spec.block_bytes)
        flat = torch.frombuffer(region.memory, dtype=TORCH_DTYPES[spec.dtype])
        return cls(spec, flat.view(region.num_blocks, *_block_shape(spec)), memoryview(region.memory))

    @classmethod
    def allocate(cls, spec: KVSpec, num_blocks: int, device: torch.device | str = "cpu") -> "KVPool":
        """Zeroed memory of its own, on any device."""
        dtype = TORCH_DTYPES[spec.dtype]
        return cls(spec, torch.zeros(num_blocks, *_block_shape(spec), dtype=dtype, device=device))

    @property
    def num_blocks(self) -> int:
        return self.data.shape[0]

    def k_cache(self, layer: int) -> Tensor:
        return self._k_caches[layer]

    def v_cache(self, layer: int) -> Tensor:
        return self._v_caches[layer]

    def copy_block(self, source: int, target: int) -> None:
        """All layers of one block onto another (copy-on-write)."""
        self.data[target].copy_(self.data[source])

    def release(self) -> None:
        """Drop every view; the pool is unusable afterwards. A region below it can then be closed."""
        self._k_caches.clear()
        self._v_caches.clear()
        self.data = torch.empty(0)
        if self._export is not None:
            self._export.release()


def _block_shape(spec: KVSpec) -> tuple[int, ...]:
    return (spec.num_layers, 2, spec.num_kv_heads, spec.block_size, spec.head_dim)
