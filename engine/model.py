"""The Llama family's forward pass over paged KV. Knows nothing of requests, scheduling or sampling.

tokens ─► embed ─► [ norm ─► qkv ─► rope + cache ─► attention ─► o ─► +norm ─► gate·up ─► silu ─► down ─► + ] × L
                                                             rows that need logits ─► norm ─► head ─► logits
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from core.kv_spec import DType
from engine.batch import ForwardBatch
from engine.kv_pool import TORCH_DTYPES, KVPool
from engine.model_config import ModelConfig
from engine.rope import cos_sin_table
from engine.weights import EMBEDDING, FINAL_NORM, HEAD, ROPE_FACTORS, OnProgress, Weight, load_weights
from kernels import ops
from kernels.cpu.decoder import DecoderLayer, DecoderShape, NativeDecoder, can_decode
from kernels.cpu.matrix import PackedMatrix
from kernels.layouts import Caches, Ragged, Rope, TokenSlots
from kernels.linear import Linear, PackedLinear, make_linear
from kernels.quantized import QuantizedWeight, concatenated

NATIVE_CACHES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One block's weights; q, k and v are fused, as are gate and up."""

    input_norm: Tensor  # [hidden]
    qkv: Linear
    rope: Rope
    output: Linear
    mlp_norm: Tensor  # [hidden]
    gate_up: Linear
    down: Linear


class LlamaModel:
    """Owns its weights. One instance may serve any number of pools of its spec, one forward at a time."""

    def __init__(
        self, config: ModelConfig, weights: dict[str, Weight], device: torch.device, dtype: torch.dtype
    ) -> None:
        """Takes the tensors out of `weights` as it packs them."""
        self.config = config
        self.device = device
        self._dtype = dtype
        self._scale = _shape(config).scale
        taken = _Weights(weights, device, dtype)
        table = cos_sin_table(config, taken.pop(ROPE_FACTORS)).to(device)
        self._layers = [_build_layer(config, taken, index, table) for index in range(config.num_layers)]
        self._final_norm = taken.need(FINAL_NORM)
        self._embedding = self._head = taken.linear([EMBEDDING])
        if not config.tie_word_embeddings:
            self._head = taken.linear([HEAD])
        self._native = self._make_native()

    @classmethod
    def load(
        cls,
        path: Path,
        config: ModelConfig,
        dtype: DType,
        device: torch.device | str = "cpu",
        on_progress: OnProgress | None = None,
        keeps_quantized: bool = False,
    ) -> "LlamaModel":
        """Raises ModelLoadError; never runs with weights that are not the file's. `keeps_quantized`: matrices stay as
        a GGUF file stores them, where this machine has the pass for that."""
        can_keep = torch.device(device).type == "cpu" and can_decode(_shape(config))
        weights = load_weights(path, config, TORCH_DTYPES[dtype], on_progress, keeps_quantized and can_keep)
        return cls(config, weights, torch.device(device), TORCH_DTYPES[dtype])

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: KVPool) -> Tensor:
        """Writes K and V into the pool's blocks; returns the logits [R, vocab] float32 of batch.logit_rows."""
        ragged = Ragged(batch.query_starts, batch.context_lens, batch.block_tables)
        slots = TokenSlots(batch.positions, batch.slot_mapping)
        if self._native is not None and pool.data.dtype in NATIVE_CACHES:
            return self._native.forward(batch.token_ids, slots, ragged, batch.logit_rows, pool.data)
        return self._forward(batch, slots, ragged, pool)

    def _forward(self, batch: ForwardBatch, slots: TokenSlots, ragged: Ragged, pool: KVPool) -> Tensor:
        """Operation by operation, wherever the tensors are."""
        eps = self.config.rms_norm_eps
        residual = self._embedding.rows(batch.token_ids).to(self._dtype)
        delta = None
        for layer, caches in zip(self._layers, _layer_caches(pool), strict=True):
            hidden = _norm(delta, residual, layer.input_norm, eps)
            query = ops.rope_and_cache(layer.qkv(hidden), layer.rope, slots, caches)
            attended = ops.paged_attention(query, caches, ragged, self._scale)
            hidden = ops.add_rms_norm(layer.output(attended.flatten(1)), residual, layer.mlp_norm, eps)
            delta = layer.down(ops.silu_mul(layer.gate_up(hidden)))
        assert delta is not None, "a model has at least one layer"
        final = residual[batch.logit_rows] + delta[batch.logit_rows]
        return self._head(ops.rms_norm(final, self._final_norm, eps)).float()

    def _make_native(self) -> NativeDecoder | None:
        """The pass in one call, where the machine and the model's shape allow it."""
        shape = _shape(self.config)
        if not can_decode(shape):
            return None
        layers = [_native_layer(layer) for layer in self._layers]
        embedding, head = _packed(self._embedding), _packed(self._head)
        if embedding is None or head is None or not all(layers):
            return None
        whole = [layer for layer in layers if layer is not None]
        return NativeDecoder(shape, whole, self._final_norm, embedding, head)


def _packed(linear: Linear) -> PackedMatrix | None:
    return linear.matrix if isinstance(linear, PackedLinear) else None


def _native_layer(layer: _Layer) -> DecoderLayer | None:
    """None unless every product of it is a native one."""
    matrices = [_packed(linear) for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    qkv, output, gate_up, down = matrices
    if qkv is None or output is None or gate_up is None or down is None:
        return None
    return DecoderLayer(layer.input_norm, qkv, layer.rope, output, layer.mlp_norm, gate_up, down)


def _norm(delta: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The layer's input; `delta` is what the layer before has yet to add (nothing before the first)."""
    if delta is None:
        return ops.rms_norm(residual, weight, eps)
    return ops.add_rms_norm(delta, residual, weight, eps)


def _layer_caches(pool: KVPool) -> Iterator[Caches]:
    for layer in range(pool.spec.num_layers):
        yield Caches(pool.k_cache(layer), pool.v_cache(layer))


class _Weights:
    """What is left of a model's weights; each is taken once."""

    def __init__(self, weights: dict[str, Weight], device: torch.device, dtype: torch.dtype) -> None:
        self._weights = weights
        self._device = device
        self._dtype = dtype

    def pop(self, name: str) -> Tensor | None:
        """One that is dense whatever form others have."""
        value = self._weights.pop(name, None)
        assert not isinstance(value, QuantizedWeight), name
        return None if value is None else value.to(self._device)

    def need(self, name: str) -> Tensor:
        value = self.pop(name)
        assert value is not None, name
        return value

    def linear(self, names: Sequence[str], biases: Sequence[str] = ()) -> Linear:
        """One product for all of them, below one another. What is stored in different forms becomes dense."""
        parts = [self._weights.pop(name) for name in names]
        added = [bias for name in biases if (bias := self.pop(name)) is not None]
        bias = torch.cat(added) if added else None
        quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
        if len(quantized) == len(parts) and len({part.kind for part in quantized}) == 1:
            return PackedLinear(concatenated(quantized), bias)
        return make_linear(torch.cat([self._dense(part) for part in parts]), bias)

    def _dense(self, part: Weight) -> Tensor:
        return (part.dequantize() if isinstance(part, QuantizedWeight) else part).to(
            self._device, self._dtype
        )


def _build_layer(config: ModelConfig, weights: _Weights, index: int, table: Tensor) -> _Layer:
    prefix = f"model.layers.{index}."

    def fused(*names: str) -> Linear:
        return weights.linear(
            [f"{prefix}{name}.weight" for name in names], [f"{prefix}{name}.bias" for name in names]
        )

    q_norm, k_norm = (weights.pop(f"{prefix}self_attn.{which}_norm.weight") for which in "qk")
    return _Layer(
        input_norm=weights.need(f"{prefix}input_layernorm.weight"),
        qkv=fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        rope=Rope(table, q_norm, k_norm, config.rms_norm_eps),
        output=fused("self_attn.o_proj"),
        mlp_norm=weights.need(f"{prefix}post_attention_layernorm.weight"),
        gate_up=fused("mlp.gate_proj", "mlp.up_proj"),
        down=fused("mlp.down_proj"),
    )


def _shape(config: ModelConfig) -> DecoderShape:
    return DecoderShape(
        config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps, config.head_dim**-0.5
    )
