"""SmolLM2 from its GGUF file against transformers, and its own logits in other batches."""

from dataclasses import replace

import pytest
import torch

from core.kv_spec import DType
from core.model_path import resolve_model
from engine.batch import BatchEntry, build_batch
from engine.kv_pool import KVPool
from engine.model import LlamaModel
from engine.model_config import ModelLoadError, kv_spec, load_model_config

BLOCK_SIZE = 16
CLEAR_GAP = 1e-3
TEXT = (
    "The lighthouse keeper had counted ships for thirty years, and in all that time he had never seen one turn back. "
    "On the morning of the storm he climbed the stairs twice: once to trim the lamp, and once because he had "
    "forgotten why he went up. The sea was the colour of slate. Far out, a small sail leaned against the wind, and "
    "he watched it through the glass until his eyes watered. Numbers help, he used to say: 1, 1, 2, 3, 5, 8, 13, 21. "
    "def count(ships):\n    return sum(1 for ship in ships if ship.turned_back)\n\nWhen the sail vanished he wrote "
    "the hour in the book, as he had been taught, and put the kettle on the stove to wait."
)


@pytest.fixture(scope="module")
def path():
    try:
        return resolve_model("smollm2")
    except ModelLoadError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def model(path):
    return LlamaModel.load(path, load_model_config(path), DType.FLOAT32)


@pytest.fixture(scope="module")
def theirs(path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GgufConfig(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=config
    )


@pytest.fixture(scope="module")
def prompt(path):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return tokenizer(TEXT)["input_ids"][:200]


def make_pool(model):
    return KVPool.allocate(kv_spec(model.config, BLOCK_SIZE, DType.FLOAT32), 64)


def test_logits_and_greedy_tokens_are_those_of_transformers(model, theirs, prompt):
    assert len(prompt) > 150
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0]
    batch = build_batch([BatchEntry(prompt, 0, list(range(20)), True)], BLOCK_SIZE)
    actual = model.forward(replace(batch, logit_rows=torch.arange(len(prompt))), make_pool(model))
    torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-4)
    top = expected.topk(2, dim=-1)
    is_clear = top.values[:, 0] - top.values[:, 1] > CLEAR_GAP
    assert is_clear.sum() > 0.9 * len(prompt)
    assert torch.equal(actual.argmax(-1)[is_clear], top.indices[is_clear, 0])


def test_logits_do_not_depend_on_batch_or_chunking(model, prompt):
    pool = make_pool(model)
    whole = model.forward(build_batch([BatchEntry(prompt, 0, list(range(20)), True)], BLOCK_SIZE), pool)
    start, blocks, others = 0, list(range(20, 40)), list(range(40, 60))
    for end in (7, 50, 51, 130, len(prompt) - 1, len(prompt)):
        mate = BatchEntry(prompt[-end : len(prompt) - start or None][: end - start], start, others, True)
        entries = [BatchEntry(prompt[start:end], start, blocks, True), mate]
        logits = model.forward(build_batch(entries, BLOCK_SIZE), pool)
        start = end
    assert torch.equal(logits[0], whole[0])
    assert not torch.equal(logits[1], whole[0])
