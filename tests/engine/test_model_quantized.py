"""The first-run model with its weights as the file stores them: close to the dense ones, in any batch the same."""

import math
from dataclasses import replace

import pytest
import torch

from core.kv_spec import DType
from core.model_path import resolve_model
from engine.batch import BatchEntry, build_batch
from engine.kv_pool import KVPool
from engine.model import LlamaModel
from engine.model_config import kv_spec, load_model_config
from gateway.text.tokenizer import TextTokenizer
from tests.engine.text import TEXT
from tokenizer.files import load_tokenizer_files

BLOCK_SIZE = 16


class Scorer:
    """Logits of every position of one text."""

    def __init__(self, dtype: DType, keeps_quantized: bool = False) -> None:
        path = resolve_model("smollm2")
        config = load_model_config(path)
        self.model = LlamaModel.load(path, config, dtype, keeps_quantized=keeps_quantized)
        self.spec = kv_spec(config, BLOCK_SIZE, dtype)

    def __call__(self, ids: list[int], chunk: int) -> torch.Tensor:
        pool = KVPool.allocate(self.spec, -(-len(ids) // BLOCK_SIZE))
        blocks = list(range(pool.num_blocks))
        rows = []
        for start in range(0, len(ids), chunk):
            tokens = ids[start : start + chunk]
            batch = build_batch([BatchEntry(tokens, start, blocks, True)], BLOCK_SIZE)
            every_row = replace(batch, logit_rows=torch.arange(len(tokens)))
            rows.append(self.model.forward(every_row, pool))
        return torch.cat(rows)


def perplexity(logits: torch.Tensor, ids: list[int]) -> float:
    losses = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]))
    return math.exp(losses.item())


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return TextTokenizer(load_tokenizer_files(resolve_model("smollm2"))).encode_text(TEXT)


@pytest.fixture(scope="module")
def stored():
    scorer = Scorer(DType.BFLOAT16, keeps_quantized=True)
    if scorer.model._native is None:
        pytest.skip("no native pass on this machine")
    return scorer


def test_perplexity_is_that_of_the_dense_weights_within_half_a_percent(stored, ids):
    dense = perplexity(Scorer(DType.FLOAT32)(ids, 512), ids)
    assert perplexity(stored(ids, 512), ids) == pytest.approx(dense, rel=0.005)
    assert perplexity(Scorer(DType.BFLOAT16)(ids, 512), ids) == pytest.approx(dense, rel=0.005)


def test_logits_are_the_same_to_the_bit_in_any_chunking(stored, ids):
    whole = stored(ids[:120], 120)
    assert torch.equal(stored(ids[:120], 17), whole)
    assert torch.equal(stored(ids[:120], 1), whole)
