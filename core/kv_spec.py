"""The geometry of a KV pool, exchanged when two workers meet. Knows nothing of memory."""

from dataclasses import dataclass, fields
from enum import StrEnum

LAYOUT_VERSION = 1


class DType(StrEnum):
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"

    @property
    def num_bytes(self) -> int:
        return 4 if self is DType.FLOAT32 else 2


@dataclass(frozen=True, slots=True)
class KVSpec:
    """A pool is `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, block-major and contiguous,
    so a block id names one contiguous region across all layers. `fingerprint` is the content identity of the
    weights: blocks of different fingerprints are never exchanged."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: DType
    fingerprint: str
    layout_version: int = LAYOUT_VERSION

    @property
    def token_bytes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.num_bytes

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def mismatch(self, other: "KVSpec") -> str | None:
        """None when blocks can be copied as they are, else the first differing field with both values."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                return f"{field.name}: {mine} here, {theirs} there"
        return None
