"""A whole forward pass as one native call. Knows nothing of files, requests or scheduling.

What passes between operations is float32, whatever weights and cache are stored as; each product is one chain over k,
so a token's result does not depend on its neighbours in the batch, in bfloat16 neither.
"""

from collections.abc import Sequence
from ctypes import POINTER, Structure, addressof, byref, c_float, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cpu.bodies import LANES, MAX_GROUP, MAX_HEAD_DIM
from kernels.cpu.crew import start_crew
from kernels.cpu.library import Matrix, exported, native
from kernels.cpu.matrix import PackedMatrix
from kernels.layouts import Ragged, Rope, TokenSlots


class _LayerWeights(Structure):
    """Mirrors the struct of that name in decoder.cpp."""

    _fields_ = (
        ("input_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv", Matrix),
        ("output", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
    )


class _Decoder(Structure):
    """Mirrors `Decoder` in decoder.cpp."""

    _fields_ = (
        ("layers", c_void_p),
        ("final_norm", c_void_p),
        ("cos_sin", c_void_p),
        ("embedding", Matrix),
        ("head", Matrix),
        ("num_layers", c_int64),
        ("hidden", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("inner", c_int64),
        ("eps", c_float),
        ("scale", c_float),
    )


class _Step(Structure):
    """Mirrors `Step` in decoder.cpp."""

    _fields_ = (
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("logit_rows", c_void_p),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("cache", c_void_p),
        ("logits", c_void_p),
        ("T", c_int64),
        ("S", c_int64),
        ("R", c_int64),
        ("max_blocks", c_int64),
        ("block_size", c_int64),
        ("is_bf16", c_int64),
    )


class DecoderShape(NamedTuple):
    """What the weights do not say."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float


class DecoderLayer(NamedTuple):
    """One block's weights."""

    input_norm: Tensor
    qkv: PackedMatrix
    rope: Rope
    output: PackedMatrix
    mlp_norm: Tensor
    gate_up: PackedMatrix
    down: PackedMatrix


def can_decode(shape: DecoderShape) -> bool:
    """Whether this machine has the native pass, and it takes heads like these."""
    is_whole = shape.head_dim % LANES == 0 and shape.head_dim <= MAX_HEAD_DIM
    return native() is not None and is_whole and shape.num_heads // shape.num_kv_heads <= MAX_GROUP


class NativeDecoder:
    """Keeps every tensor that its structs point to. One forward at a time in a process."""

    def __init__(
        self,
        shape: DecoderShape,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor,
        embedding: PackedMatrix,
        head: PackedMatrix,
    ) -> None:
        self._shape = shape
        self._vocab_size = head.num_rows
        self._kept: list[object] = [layers, embedding, head]
        structs = (_LayerWeights * len(layers))(*(self._layer(layer) for layer in layers))
        self._kept.append(structs)
        self._struct = _Decoder(
            addressof(structs),
            self._float(final_norm),
            layers[0].rope.cos_sin.data_ptr(),
            embedding.struct,
            head.struct,
            len(layers),
            embedding.width,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            layers[0].down.width,
            shape.eps,
            shape.scale,
        )
        start_crew(torch.get_num_threads())
        self._run = exported("decoder_step", (POINTER(_Decoder), POINTER(_Step)))

    def forward(
        self, token_ids: Tensor, slots: TokenSlots, ragged: Ragged, logit_rows: Tensor, cache: Tensor
    ) -> Tensor:
        """token_ids [T] int64, logit_rows [R] int64, cache [num_blocks, layers, 2, kv_heads, block_size, head_dim] ->
        logits [R, vocab] float32. Writes K and V to the tokens' slots."""
        assert cache.is_contiguous() and cache.dtype in (torch.float32, torch.bfloat16), cache.dtype
        logits = torch.empty(len(logit_rows), self._vocab_size)
        step = _Step(
            token_ids.data_ptr(),
            slots.positions.data_ptr(),
            slots.slot_mapping.data_ptr(),
            logit_rows.data_ptr(),
            ragged.query_starts.data_ptr(),
            ragged.context_lens.data_ptr(),
            ragged.block_tables.data_ptr(),
            cache.data_ptr(),
            logits.data_ptr(),
            len(token_ids),
            len(ragged.context_lens),
            len(logit_rows),
            ragged.block_tables.shape[1],
            cache.shape[4],
            cache.dtype is torch.bfloat16,
        )
        self._run(byref(self._struct), byref(step))
        return logits

    def _layer(self, layer: DecoderLayer) -> _LayerWeights:
        rope = layer.rope
        return _LayerWeights(
            self._float(layer.input_norm),
            None if rope.q_norm is None else self._float(rope.q_norm),
            None if rope.k_norm is None else self._float(rope.k_norm),
            self._float(layer.mlp_norm),
            layer.qkv.struct,
            layer.output.struct,
            layer.gate_up.struct,
            layer.down.struct,
        )

    def _float(self, weight: Tensor) -> int:
        wide = weight.float().contiguous()
        self._kept.append(wide)
        return wide.data_ptr()
