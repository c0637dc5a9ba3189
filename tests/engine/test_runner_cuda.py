"""A runner on a GPU draws what one on the CPU draws, through eager steps, captures and replays."""

import pytest
import torch

from core.ids import HandoffId, RequestId
from core.kv_spec import DType
from core.sampling import SamplingParams
from engine.cuda_graphs import CAPTURE_AT
from engine.kv_pool import KVPool
from engine.model import LlamaModel
from engine.model_config import kv_spec, load_model_config
from engine.runner import ModelRunner
from engine.scheduler import Work
from engine.sequence import Sequence
from engine.testing import make_tiny_model

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BLOCK_SIZE = 16
VARIANTS = [{"temperature": 0.0}, {"temperature": 0.8}, {"top_k": 20, "top_p": 0.9}, {}, {"top_p": 0.5}]


def make_runner(path, device):
    config = load_model_config(path)
    model = LlamaModel.load(path, config, DType.FLOAT32, device)
    pool = KVPool.allocate(kv_spec(config, BLOCK_SIZE, DType.FLOAT32), 200, device)
    return ModelRunner(model, pool, BLOCK_SIZE, device)


def make_sequences(lengths):
    generator = torch.Generator().manual_seed(6)
    return [
        Sequence(
            HandoffId(RequestId(str(i)), 1),
            torch.randint(0, 512, (length,), generator=generator).tolist(),
            length,
            SamplingParams(100, seed=40 + i, **VARIANTS[i % len(VARIANTS)]),
            "test",
            block_ids=list(range(i * 30, (i + 1) * 30)),
        )
        for i, length in enumerate(lengths)
    ]


def generate(runner, sequences, num_steps):
    """Prompts in chunks of 100, each beside what else there is to do; the tokens' log-probabilities."""
    logprobs = []
    for _ in range(num_steps):
        work = [Work(sequence, min(100, sequence.num_to_compute)) for sequence in sequences]
        sampled = runner.run(work)
        for sequence, num_tokens in work:
            sequence.num_computed += num_tokens
            if sequence.id in sampled:
                assert sampled[sequence.id].is_valid
                sequence.tokens.append(sampled[sequence.id].token_id)
                logprobs.append(sampled[sequence.id].logprob)
    return logprobs


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_a_runner_draws_what_the_cpu_draws(device, tmp_path):
    path = make_tiny_model(tmp_path / "model")
    expected, actual = (make_sequences((300, 1, 40, 17, 150, 16)) for _ in range(2))
    runners = make_runner(path, "cpu"), make_runner(path, device)
    wanted, drawn = (
        generate(runner, sequences, CAPTURE_AT + 20)
        for runner, sequences in zip(runners, (expected, actual), strict=True)
    )
    assert [sequence.tokens for sequence in actual] == [sequence.tokens for sequence in expected]
    assert drawn == pytest.approx(wanted, rel=1e-3, abs=1e-3)
