"""A forward pass an operation at a time, in the order of the whole pass: so each finds the caches as it does there.

Every call is the native one on tensors of the model's shapes, by the model's own matrices; what it computes is
dropped. The time of a call that has no rows is what calling costs, and is taken off."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.batch import BatchEntry, ForwardBatch, build_batch
from engine.kv_pool import KVPool
from engine.model import LlamaModel
from kernels.cpu import bodies
from kernels.cpu.matrix import PackedMatrix
from kernels.layouts import Caches, Ragged, TokenSlots
from kernels.linear import Linear, PackedLinear

Call = tuple[str, Callable[[], object]]
OPERATIONS = ("embedding", "qkv", "attention", "o", "norms, rope, silu", "gate_up", "down", "head")
SMALL = "norms, rope, silu"


@dataclass(frozen=True, slots=True)
class Work:
    """What an operation must at least do: bytes of weights and KV to read, floating-point operations."""

    num_bytes: float = 0.0
    flop: float = 0.0


def packed(linear: Linear) -> PackedMatrix:
    assert isinstance(linear, PackedLinear), "the model has no native pass"
    return linear.matrix


def decode_batch(num_sequences: int, context: int, block_size: int) -> ForwardBatch:
    """One new token each, the last of `context`."""
    width = -(-context // block_size)
    blocks = [list(range(width * i, width * (i + 1))) for i in range(num_sequences)]
    return build_batch(
        [BatchEntry([100 + i], context - 1, row, True) for i, row in enumerate(blocks)], block_size
    )


def prefill_batch(num_tokens: int, block_size: int) -> ForwardBatch:
    """A prompt from its start, whose last token wants logits."""
    blocks = list(range(-(-num_tokens // block_size)))
    return build_batch([BatchEntry([100 + i % 100 for i in range(num_tokens)], 0, blocks, True)], block_size)


def empty_batch() -> ForwardBatch:
    none, starts = torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    lens, tables = torch.empty(0, dtype=torch.int32), torch.empty(0, 1, dtype=torch.int32)
    return ForwardBatch(none, none, none, starts, lens, tables, none)


def times(model: LlamaModel, pool: KVPool, batch: ForwardBatch, repeats: int) -> dict[str, float]:
    """Seconds of one pass by operation, the best of several."""
    whole, idle = (best_times(list(calls(model, pool, each)), repeats) for each in (batch, empty_batch()))
    return {name: max(0.0, whole[name] - idle[name]) for name in OPERATIONS}


@torch.inference_mode()
def best_times(steps: list[Call], repeats: int) -> dict[str, float]:
    best = dict.fromkeys(OPERATIONS, float("inf"))
    for _ in range(repeats + 1):
        spent: dict[str, float] = defaultdict(float)
        for name, call in steps:
            started_s = time.perf_counter()
            call()
            spent[name] += time.perf_counter() - started_s
        best = {name: min(best[name], spent[name]) for name in OPERATIONS}
    return best


def calls(model: LlamaModel, pool: KVPool, batch: ForwardBatch) -> Iterator[Call]:
    """In order; every layer reads its own weights and its own part of the pool."""
    config, num_tokens, num_rows = model.config, len(batch.token_ids), len(batch.logit_rows)
    yield "embedding", partial(packed(model._embedding).rows, batch.token_ids)
    for index in range(config.num_layers):
        yield from layer_calls(model, index, Caches(pool.k_cache(index), pool.v_cache(index)), batch)
    chosen, delta = torch.randn(num_rows, config.hidden_size), torch.zeros(num_rows, config.hidden_size)
    yield SMALL, partial(bodies.add_rms_norm, delta, chosen, model._final_norm.float(), config.rms_norm_eps)
    yield "head", partial(packed(model._head).multiply, chosen)
    assert num_tokens == len(batch.positions)


def layer_calls(model: LlamaModel, index: int, caches: Caches, batch: ForwardBatch) -> Iterator[Call]:
    config, layer, num_tokens = model.config, model._layers[index], len(batch.token_ids)
    slots = TokenSlots(batch.positions, batch.slot_mapping)
    ragged = Ragged(batch.query_starts, batch.context_lens, batch.block_tables)

    def values(width: int) -> Tensor:
        return torch.randn(num_tokens, width)

    def norm(weight: Tensor) -> Call:
        hidden, none = values(config.hidden_size), torch.zeros(num_tokens, config.hidden_size)
        return SMALL, partial(bodies.add_rms_norm, none, hidden, weight.float(), config.rms_norm_eps)

    def product(name: str, linear: Linear) -> Call:
        return name, partial(packed(linear).multiply, values(linear.in_features))

    qkv = values(layer.qkv.out_features).to(caches.k.dtype)
    query = values(config.num_heads * config.head_dim).to(caches.k.dtype)
    heads = query.view(num_tokens, config.num_heads, config.head_dim)
    yield norm(layer.input_norm)
    yield product("qkv", layer.qkv)
    yield SMALL, partial(bodies.rope_and_cache, qkv, layer.rope, slots, caches)
    yield "attention", partial(bodies.paged_attention, heads, caches, ragged, config.head_dim**-0.5)
    yield product("o", layer.output)
    yield norm(layer.mlp_norm)
    yield product("gate_up", layer.gate_up)
    yield SMALL, partial(bodies.silu_mul, values(layer.gate_up.out_features))
    yield product("down", layer.down)


def least_work(model: LlamaModel, pool: KVPool, batch: ForwardBatch) -> dict[str, Work]:
    """By operation, of one pass. Norms and the like have neither weights nor products to speak of."""
    num_tokens, layers = len(batch.token_ids), model._layers
    embedding = packed(model._embedding)
    return {
        "embedding": Work(embedding.num_bytes / embedding.num_rows * num_tokens),
        "qkv": _products([packed(layer.qkv) for layer in layers], num_tokens),
        "attention": _attention(model, pool, batch),
        "o": _products([packed(layer.output) for layer in layers], num_tokens),
        SMALL: Work(),
        "gate_up": _products([packed(layer.gate_up) for layer in layers], num_tokens),
        "down": _products([packed(layer.down) for layer in layers], num_tokens),
        "head": _products([packed(model._head)], len(batch.logit_rows)),
    }


def _products(matrices: list[PackedMatrix], num_rows: int) -> Work:
    flop = sum(2 * num_rows * matrix.num_rows * matrix.width for matrix in matrices)
    return Work(sum(matrix.num_bytes for matrix in matrices), flop)


def _attention(model: LlamaModel, pool: KVPool, batch: ForwardBatch) -> Work:
    """Each sequence's K and V once; scores and sums of every (token, head) over what it may see."""
    config, num_keys = model.config, int((batch.positions + 1).sum())
    flop = 4 * num_keys * config.num_heads * config.head_dim * config.num_layers
    return Work(int(batch.context_lens.sum()) * pool.spec.token_bytes, flop)
