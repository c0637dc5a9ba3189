"""Many small tensors as one buffer of bytes."""

import pytest
import torch

from engine.staging import ALIGNMENT, Layout, stage

CPU = torch.device("cpu")
PARTS = [
    torch.arange(5, dtype=torch.int32),
    torch.arange(3, dtype=torch.int64) + 2**40,
    torch.empty(0, dtype=torch.float64),
    torch.tensor([[1.5, -0.0, torch.inf]]),
    torch.arange(6, dtype=torch.int32).view(2, 3)[:, ::2],
]


def test_what_arrives_is_what_was_sent():
    arrived = stage(PARTS, CPU)
    for part, wanted in zip(arrived, PARTS, strict=True):
        assert part.dtype is wanted.dtype
        assert torch.equal(part, wanted)
        assert part.is_contiguous()


def test_parts_lie_in_one_buffer_and_share_no_byte():
    arrived = stage(PARTS, CPU)
    assert len({part.untyped_storage().data_ptr() for part in arrived}) == 1
    for part in arrived:
        part.fill_(7)
    for part in arrived:
        assert (part == 7).all()
        assert part.data_ptr() % ALIGNMENT == 0 or not part.numel()


def test_a_copy_is_not_the_original():
    first = torch.zeros(4)
    (arrived,) = stage([first], CPU)
    first.fill_(1)
    assert not arrived.any()


def test_a_buffer_of_another_size_is_a_bug():
    layout = Layout([(torch.int64, (4,))])
    with pytest.raises(RuntimeError):
        layout.views(torch.empty(layout.num_bytes - 8, dtype=torch.uint8))
