"""The model's logits: in float32 the same to the bit in any batch and chunking, and those of transformers."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.kv_spec import DType
from engine.batch import BatchEntry, build_batch
from engine.kv_pool import KVPool
from engine.model import LlamaModel
from engine.model_config import RopeKind, RopeScaling, kv_spec, load_model_config
from engine.rope import inverse_frequencies
from engine.testing import ARCHITECTURES, make_tiny_model

ROOT = Path(__file__).parents[2]
BLOCK_SIZE = 16
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    **{name: (name, {}) for name in ARCHITECTURES},
    "llama3": ("llama", {"rope_scaling": LLAMA3}),
    "linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "untied": ("llama", {"tie_word_embeddings": False}),
    "biases": ("llama", {"attention_bias": True}),
    "grouped": ("qwen3", {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 32}),
}


class Runner:
    """A model over a pool, with a block table of its own for each named sequence."""

    def __init__(self, path, dtype=DType.FLOAT32, num_blocks=100):
        config = load_model_config(path)
        self.model = LlamaModel.load(path, config, dtype)
        self.pool = KVPool.allocate(kv_spec(config, BLOCK_SIZE, dtype), num_blocks)
        self.pool.data.fill_(torch.nan)
        self.free = torch.randperm(num_blocks).tolist()
        self.blocks = {}

    def entry(self, name, token_ids, start, needs_logits=True):
        blocks = self.blocks.setdefault(name, [])
        while len(blocks) * BLOCK_SIZE < start + len(token_ids):
            blocks.append(self.free.pop())
        return BatchEntry(token_ids, start, blocks, needs_logits)

    def __call__(self, *entries):
        return self.model.forward(build_batch(entries, BLOCK_SIZE), self.pool)


def all_logits(runner, name, token_ids):
    """The logits after every prefix, each token a step of its own."""
    return torch.cat([runner(runner.entry(name, [token], i)) for i, token in enumerate(token_ids)])


@pytest.fixture(scope="module", params=MODELS, ids=str)
def directory(request, tmp_path_factory):
    kind, overrides = MODELS[request.param]
    return make_tiny_model(tmp_path_factory.mktemp(request.param), kind, seed=3, **overrides)


@pytest.fixture
def prompt():
    return torch.randint(0, 512, (150,), generator=torch.Generator().manual_seed(5)).tolist()


def test_logits_do_not_depend_on_batch_or_chunking(directory, prompt):
    runner = Runner(directory)
    whole = runner(runner.entry("whole", prompt, 0))
    other = [3 * token % 512 for token in prompt]
    for name, ends in {"odd": [1, 18, 49, 50, 113, 150], "late": [149, 150], "blocks": [16, 64, 150]}.items():
        start = 0
        for end in ends:
            runner_up = runner.entry(f"other {name}", other[start:end], start, needs_logits=start % 2 == 0)
            logits = runner(runner_up, runner.entry(name, prompt[start:end], start))
            start = end
        assert torch.equal(logits[-1], whole[0]), name


def test_decode_steps_equal_prefill(directory, prompt):
    runner = Runner(directory)
    steps = all_logits(runner, "steps", prompt[:40])
    for end in (1, 15, 16, 17, 33, 40):
        assert torch.equal(runner(runner.entry(f"to {end}", prompt[:end], 0))[0], steps[end - 1]), end


def test_decode_batches_equal_single_steps(directory, prompt):
    single, batched = Runner(directory), Runner(directory)
    rows = [prompt[i : i + 20 + i] for i in range(7)]
    expected = [all_logits(single, i, row)[-1] for i, row in enumerate(rows)]
    batched(*(batched.entry(i, row[:-1], 0, needs_logits=False) for i, row in enumerate(rows[:-1])))
    actual = batched(*(batched.entry(i, row[-1:], len(row) - 1) for i, row in enumerate(rows[:-1])))
    assert actual.shape == (6, 512)
    for logits, wanted in zip(actual, expected, strict=False):
        assert torch.equal(logits, wanted)


def test_a_failed_sequence_harms_no_other(directory, prompt):
    """NaN in one sequence's cache stays there."""
    runner = Runner(directory)
    clean = runner(runner.entry("clean", prompt[:20], 0))
    runner(runner.entry("ill", prompt[:20], 0))
    for cache in (runner.pool.k_cache(0), runner.pool.v_cache(0)):
        cache[runner.blocks["ill"][0], :, 3] = torch.nan
    again = runner.entry("clean", prompt[19:20], 19)
    logits = runner(runner.entry("ill", prompt[20:21], 20), again)
    assert logits[0].isnan().any()
    assert torch.equal(logits[1], clean[0])


def test_logits_equal_those_of_transformers(directory, prompt):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0]
    actual = all_logits(Runner(directory), "all", prompt)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    config = load_model_config(directory)
    assert torch.equal(inverse_frequencies(config), theirs.model.rotary_emb.inv_freq)


def test_bfloat16_is_near_float32(directory, prompt):
    wide, narrow = (Runner(directory, dtype) for dtype in (DType.FLOAT32, DType.BFLOAT16))
    expected = wide(wide.entry("p", prompt, 0))
    actual = narrow(narrow.entry("p", prompt, 0))
    assert actual.dtype is torch.float32
    assert (actual - expected).abs().max() < 0.1 * expected.abs().max()
    assert (actual - expected).abs().max() > 0


def test_float16_runs_on_the_torch_bodies(directory, prompt):
    wide, narrow = (Runner(directory, dtype) for dtype in (DType.FLOAT32, DType.FLOAT16))
    expected = wide(wide.entry("p", prompt, 0))
    assert (narrow(narrow.entry("p", prompt, 0)) - expected).abs().max() < 0.02 * expected.abs().max()


def test_stored_rope_factors_divide_the_frequencies(tmp_path):
    config = load_model_config(make_tiny_model(tmp_path / "m"))
    factors = torch.linspace(1, 8, 8)
    stored = replace(config, rope_scaling=RopeScaling(RopeKind.STORED))
    assert torch.equal(inverse_frequencies(stored, factors), inverse_frequencies(config) / factors)


def test_the_torch_bodies_pass_the_same_tests():
    """This file again, without the native library."""
    if os.environ.get("TANDEM_CPU_KERNELS") == "torch":
        pytest.skip("this is that run")
    options = ["-q", "-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            __file__,
            *options,
            "-k",
            "(grouped or biases) and not transformers and not float16",
        ],
        cwd=ROOT,
        env=os.environ | {"TANDEM_CPU_KERNELS": "torch"},
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_the_pass_in_one_call_is_that_of_single_operations(directory, dtype):
    """The latter stores more of what passes between them in bfloat16, and so does the former where the processor
    multiplies that."""
    whole, single = Runner(directory, dtype), Runner(directory, dtype)
    if whole.model._native is None:
        pytest.skip("no native pass on this machine")
    single.model._native = None
    tokens = [7, 3, 250, 11, 9] * 9
    for start, end in ((0, 20), (20, 44), (44, 45)):
        logits = [
            runner(runner.entry("a", tokens[start:end], start), runner.entry("b", tokens[: end - start], 0))
            for runner in (whole, single)
        ]
        tolerance = 1e-4 if dtype is DType.FLOAT32 else 0.1
        torch.testing.assert_close(*logits, rtol=tolerance, atol=tolerance)
    cached = (whole.pool.data[whole.blocks["a"][:2]], single.pool.data[single.blocks["a"][:2]])
    torch.testing.assert_close(*(part.float() for part in cached), rtol=0.1, atol=0.1)


def test_bfloat16_is_the_same_to_the_bit_in_any_batch_where_the_pass_is_native(directory):
    runner = Runner(directory, DType.BFLOAT16)
    if runner.model._native is None:
        pytest.skip("no native pass on this machine")
    tokens = [7, 3, 250, 11, 9] * 9
    alone = runner(runner.entry("alone", tokens, 0))
    others = [runner.entry(f"other {i}", tokens[i : i + 1 + 7 * i], 0) for i in range(1, 5)]
    together = runner(*others, runner.entry("together", tokens, 0))
    assert torch.equal(together[-1], alone[0])
    for start in range(0, len(tokens), 13):
        chunk = runner(runner.entry("chunks", tokens[start : start + 13], start))
    assert torch.equal(chunk[0], alone[0])
