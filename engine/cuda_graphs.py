"""Decode steps replayed as CUDA graphs: one launch where the model has hundreds. Knows nothing of requests.

    batch of S sequences, on the host ─► inputs at fixed addresses, filled up with padding ─► replay ─► logits[:S]

A graph serves every batch of its shape: S up to a power of two, block tables up to a power of two wide. Padding is
computed like the rest but stored nowhere. Anything but one token a sequence, all wanting logits, runs eagerly.

A shape is captured when it is used for the CAPTURE_AT-th time and runs eagerly before that: nobody waits for shapes
that others may need, and the first request's first tokens wait for none.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.batch import ForwardBatch
from engine.staging import Layout, host_buffer, stage
from kernels.layouts import PADDING_SLOT

MAX_SEQS = 256
"""Larger batches compute for longer than their launches take."""
MIN_BLOCKS = 16
CAPTURE_AT = 8

Run = Callable[[], Tensor]
Capture = Callable[[Run], Run]
"""Takes what computes into one tensor from inputs at fixed addresses; returns what does so again."""


class GraphShape(NamedTuple):
    num_seqs: int
    num_blocks: int


def graph_shape(batch: ForwardBatch) -> GraphShape | None:
    """The smallest shape that holds the batch; None where only an eager pass will do. Looks at sizes alone."""
    num_seqs, num_blocks = batch.block_tables.shape
    if not batch.token_ids.shape[0] == batch.logit_rows.shape[0] == num_seqs <= MAX_SEQS:
        return None
    return GraphShape(_power_of_two(num_seqs), max(MIN_BLOCKS, _power_of_two(num_blocks)))


class StaticInputs:
    """A decode batch of one shape at fixed addresses on the device, written by one copy."""

    def __init__(self, shape: GraphShape, device: torch.device) -> None:
        wide, narrow = (torch.int64, (shape.num_seqs,)), (torch.int32, (shape.num_seqs,))
        self._layout = Layout([wide, wide, wide, narrow, (torch.int32, shape)])
        self._buffer = torch.zeros(self._layout.num_bytes, dtype=torch.uint8, device=device)
        token_ids, positions, slot_mapping, context_lens, block_tables = self._layout.views(self._buffer)
        self.batch = ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            query_starts=torch.arange(shape.num_seqs + 1, dtype=torch.int32, device=device),
            context_lens=context_lens,
            block_tables=block_tables,
            logit_rows=torch.arange(shape.num_seqs, device=device),
        )

    def fill(self, batch: ForwardBatch) -> None:
        """A batch on the host that fits, in front; padding behind it."""
        buffer = host_buffer(self._layout.num_bytes, self._buffer.device)
        parts = (batch.token_ids, batch.positions, batch.slot_mapping, batch.context_lens, batch.block_tables)
        padding = (0, 0, PADDING_SLOT, 0, 0)
        for view, part, filler in zip(self._layout.views(buffer), parts, padding, strict=True):
            view.fill_(filler)
            view[tuple(slice(size) for size in part.shape)] = part
        self._buffer.copy_(buffer, non_blocking=True)


class DecodeGraphs:
    """Owns inputs and graph of every shape that it captured. `forward` takes a batch on the device and returns its
    logits [R, vocab]."""

    def __init__(
        self, forward: Callable[[ForwardBatch], Tensor], device: torch.device, capture: Capture
    ) -> None:
        self._forward = forward
        self._device = device
        self._capture = capture
        self._uses: Counter[GraphShape] = Counter()
        self._captured: dict[GraphShape, tuple[StaticInputs, Run]] = {}

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """The logits [R, vocab] of a batch on the host, valid until the next call."""
        shape = graph_shape(batch)
        if shape is not None:
            self._note_use(shape, batch)
        if shape not in self._captured:
            return self._forward(ForwardBatch(*stage(_tensors(batch), self._device)))
        inputs, replay = self._captured[shape]
        inputs.fill(batch)
        return replay()[: batch.token_ids.shape[0]]

    def _note_use(self, shape: GraphShape, batch: ForwardBatch) -> None:
        """Captures at most once a shape, also if it fails: the next step of that shape runs eagerly. A capture may
        compute the batch; that is no harm, since a step that is computed again stores the same again."""
        self._uses[shape] += 1
        if self._uses[shape] == CAPTURE_AT:
            inputs = StaticInputs(shape, self._device)
            inputs.fill(batch)
            self._captured[shape] = inputs, self._capture(partial(self._forward, inputs.batch))


class CudaCapture:
    """torch's graphs, which share one pool of memory: they never run at the same time, and an output is used up
    before the next one is made."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        run()  # whatever compiles or allocates at its first call must not do so while it is recorded
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = run()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


def _tensors(batch: ForwardBatch) -> list[Tensor]:
    return [getattr(batch, field.name) for field in fields(batch)]


def _power_of_two(count: int) -> int:
    """The smallest one that is not below `count`."""
    return 1 << (count - 1).bit_length()
