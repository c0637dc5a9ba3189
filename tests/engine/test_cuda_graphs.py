"""Decode steps on fixed inputs. A "capture" here keeps the function, which is all that differs from a GPU."""

from dataclasses import fields

import pytest
import torch

from core.kv_spec import DType
from engine.batch import BatchEntry, ForwardBatch, build_batch
from engine.cuda_graphs import CAPTURE_AT, MAX_SEQS, DecodeGraphs, GraphShape, StaticInputs, graph_shape
from engine.kv_pool import KVPool
from engine.model import LlamaModel
from engine.model_config import kv_spec, load_model_config
from engine.testing import make_tiny_model
from kernels.layouts import PADDING_SLOT

CPU = torch.device("cpu")
BLOCK_SIZE = 16


def steps(num_seqs, position=20, needs_logits=True):
    """One token a sequence: sequence i at `position` + i, with blocks of its own, in order."""
    blocks = (position + num_seqs) // BLOCK_SIZE + 1
    return build_batch(
        [
            BatchEntry([i + 1], position + i, list(range(i * blocks, (i + 1) * blocks)), needs_logits)
            for i in range(num_seqs)
        ],
        BLOCK_SIZE,
    )


class Recorder:
    """A forward pass whose logits are [token id, context length], and a capture; both count."""

    def __init__(self):
        self.batches = []
        self.num_captures = 0

    def forward(self, batch):
        self.batches.append(batch)
        return torch.stack((batch.token_ids[batch.logit_rows], batch.context_lens), -1).float()

    def capture(self, run):
        self.num_captures += 1
        return run


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def graphs(recorder):
    return DecodeGraphs(recorder.forward, CPU, recorder.capture)


def warm_up(graphs, *batches):
    for _ in range(CAPTURE_AT):
        for batch in batches:
            graphs(batch)


@pytest.mark.parametrize(
    ("num_seqs", "position", "expected"),
    [(1, 0, (1, 16)), (2, 0, (2, 16)), (3, 255, (4, 32)), (5, 250, (8, 16)), (9, 600, (16, 64))],
)
def test_the_smallest_shape_that_holds_a_batch(num_seqs, position, expected):
    assert graph_shape(steps(num_seqs, position)) == expected


def test_only_steps_that_all_want_logits_have_a_shape():
    assert graph_shape(steps(2, needs_logits=False)) is None
    assert graph_shape(build_batch([BatchEntry([1, 2], 0, [0], True)], BLOCK_SIZE)) is None
    mixed = [BatchEntry([1], 0, [0], True), BatchEntry([1, 2], 0, [1], False), BatchEntry([1], 0, [0], True)]
    assert graph_shape(build_batch(mixed, BLOCK_SIZE)) is None
    assert graph_shape(steps(MAX_SEQS)) is not None
    assert graph_shape(steps(MAX_SEQS + 1)) is None


def test_padding_lies_behind_the_batch():
    inputs = StaticInputs(GraphShape(4, 16), CPU)
    inputs.fill(steps(4, 100))
    inputs.fill(steps(3))
    batch = inputs.batch
    assert batch.token_ids.tolist() == [1, 2, 3, 0]
    assert batch.positions.tolist() == [20, 21, 22, 0]
    assert batch.slot_mapping.tolist() == [20, 16 * 3 + 5, 16 * 5 + 6, PADDING_SLOT]
    assert batch.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert batch.context_lens.tolist() == [21, 22, 23, 0]
    assert batch.block_tables[:, :2].tolist() == [[0, 1], [2, 3], [4, 5], [0, 0]]
    assert not batch.block_tables[:, 2:].any()
    assert batch.logit_rows.tolist() == [0, 1, 2, 3]


def test_static_inputs_have_the_types_of_a_batch_and_stay_where_they_are():
    inputs, batch = StaticInputs(GraphShape(4, 16), CPU), steps(3)
    places = [getattr(inputs.batch, field.name).data_ptr() for field in fields(ForwardBatch)]
    inputs.fill(batch)
    for field, place in zip(fields(ForwardBatch), places, strict=True):
        part = getattr(inputs.batch, field.name)
        assert part.data_ptr() == place
        assert part.dtype is getattr(batch, field.name).dtype
        assert part.is_contiguous()


def test_a_shape_is_captured_once_and_only_after_some_eager_steps(graphs, recorder):
    for _ in range(CAPTURE_AT - 1):
        graphs(steps(3))
    assert recorder.num_captures == 0
    assert all(batch.token_ids.shape == (3,) for batch in recorder.batches)
    for num_seqs in (3, 4, 3):
        graphs(steps(num_seqs))
    assert recorder.num_captures == 1
    assert [batch.token_ids.shape for batch in recorder.batches[-3:]] == [(4,)] * 3
    graphs(steps(5))
    assert recorder.num_captures == 1


def test_replays_read_one_place_and_give_the_rows_of_the_batch(graphs, recorder):
    warm_up(graphs, steps(3), steps(8))
    recorder.batches.clear()
    for num_seqs, position in ((3, 20), (4, 40), (8, 0), (7, 200), (3, 99)):
        logits = graphs(steps(num_seqs, position))
        assert logits[:, 0].tolist() == [i + 1 for i in range(num_seqs)]
        assert logits[:, 1].tolist() == [position + i + 1 for i in range(num_seqs)]
    assert len({batch.token_ids.data_ptr() for batch in recorder.batches}) == 2


def test_other_batches_run_eagerly_in_between(graphs, recorder):
    warm_up(graphs, steps(2))
    prompt = build_batch([BatchEntry([7, 8, 9], 0, [3], True)], BLOCK_SIZE)
    assert graphs(prompt).tolist() == [[9, 3]]
    for field in fields(ForwardBatch):
        assert torch.equal(getattr(recorder.batches[-1], field.name), getattr(prompt, field.name))
    assert graphs(steps(2))[:, 0].tolist() == [1, 2]


def test_a_capture_that_fails_is_not_tried_again(recorder):
    def fail(run):
        recorder.num_captures += 1
        raise MemoryError

    graphs = DecodeGraphs(recorder.forward, CPU, fail)
    with pytest.raises(MemoryError):
        warm_up(graphs, steps(2))
    warm_up(graphs, steps(2))
    assert recorder.num_captures == 1


def test_padding_changes_neither_logits_nor_any_block(tmp_path):
    """The whole model, in the plain torch bodies: float16 has no others on a CPU."""
    path = make_tiny_model(tmp_path / "model")
    config = load_model_config(path)
    model = LlamaModel.load(path, config, DType.FLOAT16)
    pools = [KVPool.allocate(kv_spec(config, BLOCK_SIZE, DType.FLOAT16), 12) for _ in range(2)]
    graphs = DecodeGraphs(lambda batch: model.forward(batch, pools[1]), CPU, lambda run: run)
    warm_up(graphs, steps(3))
    before = torch.randn(pools[0].data.shape, generator=torch.Generator().manual_seed(1)).half()
    for pool in pools:
        pool.data.copy_(before)
    torch.testing.assert_close(graphs(steps(3)), model.forward(steps(3), pools[0]), rtol=0.01, atol=0.01)
    torch.testing.assert_close(pools[1].data, pools[0].data, rtol=0.01, atol=0.01)
    is_written = (pools[1].data != before).flatten(1).any(1)
    assert is_written.nonzero().flatten().tolist() == [1, 3, 5]
