"""A pool on a device and its mirror in host memory: the region that connectors read and write, with the same block
ids. Knows nothing of which block belongs to whom.

    device   pool      [ . 1 . . 4 5 . ]
                         │ gather_blocks     ▲ scatter_blocks
             packed    [ 1 4 5 ]                                at most `staging_bytes`
                         │ one copy          ▲
    host     staging   [ 1 4 5 ]                                pinned, likewise
                         │ a copy a run      ▲
             region    [ . 1 . . 4 5 . ]
                         publish             take_in

The pool is the truth: of the region only blocks count that were published and are still held, or that a verified seal
covers and are not yet taken in.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from core.ids import BlockId, HandoffId
from core.kv_region import KVRegion
from engine.engine import Runner
from engine.kv_pool import KVPool
from engine.scheduler import Sampled, Work
from engine.staging import host_buffer, stage
from kernels import ops

STAGING_BYTES = 32 << 20


class BlockRun(NamedTuple):
    """`num_blocks` adjacent blocks from `first` on, packed from `position` on."""

    first: BlockId
    position: int
    num_blocks: int


def runs_of(block_ids: Seq[BlockId]) -> Iterator[BlockRun]:
    """Blocks in the order in which they are packed, adjacent ones together."""
    start = 0
    for end in range(1, len(block_ids) + 1):
        if end == len(block_ids) or block_ids[end] != block_ids[end - 1] + 1:
            yield BlockRun(block_ids[start], start, end - start)
            start = end


class HostMirror:
    """Moves blocks on the caller's thread. Owns the memory on the way; neither the pool nor the region, which closes
    once this is gone."""

    def __init__(self, pool: KVPool, region: KVRegion, staging_bytes: int = STAGING_BYTES) -> None:
        """The pool may be on a CPU as well, apart from the region: then all is the same but slower than none."""
        assert pool.num_blocks == region.num_blocks, (pool.num_blocks, region.num_blocks)
        self._pool = pool
        self._host = KVPool.over(region, pool.spec)
        num_staged = min(pool.num_blocks, max(1, staging_bytes // pool.spec.block_bytes))
        self._packed = torch.empty_like(pool.data[:num_staged])
        staging = host_buffer(num_staged * pool.spec.block_bytes, pool.data.device)
        self._staging = staging.view(pool.data.dtype).view(self._packed.shape)

    def publish(self, block_ids: Seq[BlockId]) -> None:
        """Pool to region. When it returns, the region holds what all work queued so far has put into these blocks."""
        for part in self._parts(block_ids):
            packed, staging = self._packed[: len(part)], self._staging[: len(part)]
            ops.gather_blocks(self._pool.data, self._on_device(part), packed)
            staging.copy_(packed)
            for first, position, count in runs_of(part):
                self._host.data[first : first + count].copy_(staging[position : position + count])

    def take_in(self, block_ids: Seq[BlockId]) -> None:
        """Region to pool, no block twice. When it returns, the region's blocks may change again; later work on the
        device finds the pool's written."""
        for part in self._parts(block_ids):
            packed, staging = self._packed[: len(part)], self._staging[: len(part)]
            for first, position, count in runs_of(part):
                staging[position : position + count].copy_(self._host.data[first : first + count])
            packed.copy_(staging)
            ops.scatter_blocks(packed, self._on_device(part), self._pool.data)

    def _parts(self, block_ids: Seq[BlockId]) -> Iterator[list[BlockId]]:
        """As many at a time as the staging holds, in ascending order: that makes the longest runs."""
        ordered, size = sorted(block_ids), self._packed.shape[0]
        return (ordered[start : start + size] for start in range(0, len(ordered), size))

    def _on_device(self, block_ids: Seq[BlockId]) -> Tensor:
        (ids,) = stage([torch.tensor(block_ids, dtype=torch.int64)], self._pool.data.device)
        return ids


class PublishingRunner:
    """A sender's runner: the blocks that a step completes are published before anybody hears of the step, and before
    they can be found in the prefix cache. So every block that a prompt shares is in the region already."""

    def __init__(self, runner: Runner, mirror: HostMirror, block_size: int) -> None:
        self._runner = runner
        self._mirror = mirror
        self._block_size = block_size

    def run(self, work: Seq[Work]) -> dict[HandoffId, Sampled]:
        sampled = self._runner.run(work)
        self._mirror.publish([block for item in work for block in completed_blocks(item, self._block_size)])
        return sampled


def completed_blocks(work: Work, block_size: int) -> list[BlockId]:
    """Those that nothing will be added to after `work`, which is computed but not yet committed; the last one of
    tokens that end in it counts, full or not.

    tokens    [ num_computed ....... | num_tokens .......... | later ..
    blocks    [ 0 ..... | 1 ..... | 2 ..... | 3 ..... | 4 ..... | 5 ..
                                  └─ completed here ─┘
    """
    sequence = work.sequence
    end = sequence.num_computed + work.num_tokens
    num_whole = -(-end // block_size) if work.needs_token else end // block_size
    return sequence.block_ids[sequence.num_computed // block_size : num_whole]
