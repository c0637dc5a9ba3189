"""A KV pool's bytes as a memfd that several processes of one host map. Knows nothing of torch or transfers.

    fd ─► [ block 0 | block 1 | ... | block num_blocks-1 ]      each block_bytes long, no header

A new memfd is made for each epoch, so a killed worker leaves nothing behind; nothing has a name in a file system.
"""

import mmap
import os
from dataclasses import dataclass

from core.ids import BlockId


@dataclass(frozen=True, slots=True)
class KVRegion:
    """The creator and each mapper own their own mapping; close() ends this one only. `fd` stays owned by the
    region and is closed with it."""

    fd: int
    memory: mmap.mmap
    block_bytes: int
    num_blocks: int

    @classmethod
    def create(cls, block_bytes: int, num_blocks: int) -> "KVRegion":
        """Raises OSError when the kernel refuses the size."""
        fd = os.memfd_create("tandem-kv", os.MFD_CLOEXEC)
        os.ftruncate(fd, block_bytes * num_blocks)
        return cls.attach(fd, block_bytes, num_blocks)

    @classmethod
    def attach(cls, fd: int, block_bytes: int, num_blocks: int) -> "KVRegion":
        """Map `fd`, taking ownership of it. Raises ValueError when the file is smaller than the geometry says."""
        size = block_bytes * num_blocks
        actual = os.fstat(fd).st_size
        if actual != size:
            raise ValueError(f"KV region holds {actual} bytes, geometry needs {size}")
        return cls(fd, mmap.mmap(fd, size), block_bytes, num_blocks)

    def view(self, first: BlockId, num_blocks: int = 1) -> memoryview:
        """The bytes of adjacent blocks, writable, without a copy."""
        assert first >= 0 and first + num_blocks <= self.num_blocks, (first, num_blocks, self.num_blocks)
        start = first * self.block_bytes
        return memoryview(self.memory)[start : start + num_blocks * self.block_bytes]

    def close(self) -> None:
        self.memory.close()
        os.close(self.fd)
