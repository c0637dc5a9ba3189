"""A model's weights as torch tensors under their Hugging Face names, complete and of the right shapes, or an error.

Knows nothing of how they are used. GGUF files of the llama architecture store the rows of q and k for rotation in
adjacent pairs; they are put back for rotation in halves:

    GGUF   x0 x(d/2) x1 x(d/2+1) ...        here   x0 x1 ... x(d/2) x(d/2+1) ...
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from gguf.constants import GGMLQuantizationType
from safetensors import SafetensorError, safe_open
from torch import Tensor

from core.errors import ModelLoadError
from engine.gguf_file import GGUFFile
from engine.hf_config import LLAMA, weight_files
from engine.model_shape import ModelConfig, RopeKind
from kernels.quantized import QuantizedKind, QuantizedWeight

OnProgress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
ROPE_FACTORS = "rope_freqs.weight"
Shapes = dict[str, tuple[int, ...]]
Weight = Tensor | QuantizedWeight
_QUANTIZED = {
    GGMLQuantizationType.Q4_0: QuantizedKind.Q4_0,
    GGMLQuantizationType.Q4_1: QuantizedKind.Q4_1,
    GGMLQuantizationType.Q8_0: QuantizedKind.Q8_0,
}

_GGUF_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class _Read(NamedTuple):
    """One tensor as it lies in the files, of `num_bytes` there."""

    name: str
    value: Weight
    num_bytes: int


def load_weights(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    on_progress: OnProgress | None = None,
    keeps_quantized: bool = False,
) -> dict[str, Weight]:
    """Every tensor of `expected_shapes(config)`, on the host, in `dtype` (rope factors stay float32); with
    `keeps_quantized`, a GGUF file's matrices as they are stored, where there are products for that. A head beside
    tied embeddings is left out. Raises ModelLoadError naming the tensor that is missing, damaged, of another shape
    or not one of the model's."""
    shapes = expected_shapes(config)
    weights: dict[str, Weight] = {}
    total_bytes = sum(file.stat().st_size for file in ([path] if path.is_file() else weight_files(path)))
    done_bytes = 0
    is_file = path.is_file()
    for name, value, num_bytes in (
        _read_gguf(path, config, keeps_quantized) if is_file else _read_directory(path)
    ):
        if not _is_ignored(name, config):
            _check(path, name, value, shapes)
            if isinstance(value, QuantizedWeight) or name == ROPE_FACTORS:
                weights[name] = value
            else:
                weights[name] = value.to(dtype)
        done_bytes += num_bytes
        if on_progress is not None:
            on_progress(min(done_bytes, total_bytes), total_bytes)
    missing = sorted(shapes.keys() - weights.keys())
    if missing:
        raise ModelLoadError(f"{path}: tensor {missing[0]} is missing ({len(missing)} are)")
    return weights


def expected_shapes(config: ModelConfig) -> Shapes:
    hidden, q_rows = config.hidden_size, config.num_heads * config.head_dim
    shapes: Shapes = {EMBEDDING: (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    if config.rope_scaling is not None and config.rope_scaling.kind is RopeKind.STORED:
        shapes[ROPE_FACTORS] = (config.head_dim // 2,)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(config, q_rows).items()}
    return shapes


def _layer_shapes(config: ModelConfig, q_rows: int) -> Shapes:
    hidden, inner, kv_rows = (
        config.hidden_size,
        config.intermediate_size,
        config.num_kv_heads * config.head_dim,
    )
    shapes: Shapes = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_rows, hidden),
        "self_attn.k_proj.weight": (kv_rows, hidden),
        "self_attn.v_proj.weight": (kv_rows, hidden),
        "self_attn.o_proj.weight": (hidden, q_rows),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.attention_bias:
        rows = {"q": q_rows, "k": kv_rows, "v": kv_rows}
        shapes |= {f"self_attn.{which}_proj.bias": (num_rows,) for which, num_rows in rows.items()}
    if config.output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {f"self_attn.{which}_norm.weight": (config.head_dim,) for which in "qk"}
    return shapes


def _is_ignored(name: str, config: ModelConfig) -> bool:
    """Old checkpoints store the rotary table; some store the head beside the embedding that it is tied to."""
    return name.endswith("rotary_emb.inv_freq") or (name == HEAD and config.tie_word_embeddings)


def _check(path: Path, name: str, value: Weight, shapes: Shapes) -> None:
    if name not in shapes:
        raise ModelLoadError(f"{path}: tensor {name} is not one of this model's")
    if tuple(value.shape) != shapes[name]:
        raise ModelLoadError(f"{path}: tensor {name} has shape {tuple(value.shape)}, not {shapes[name]}")


def _read_directory(directory: Path) -> Iterator[_Read]:
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    value = file.get_tensor(name)
                    yield _Read(name, value, value.nbytes)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path}: damaged or truncated safetensors file: {error}") from error


def _read_gguf(path: Path, config: ModelConfig, keeps_quantized: bool) -> Iterator[_Read]:
    with GGUFFile(path) as file:
        for tensor in file.tensors.values():
            name = _hf_name(tensor.name)
            kind = _QUANTIZED.get(GGMLQuantizationType(tensor.type_id))
            is_kept = keeps_quantized and kind is not None and len(tensor.shape) == 2
            value = torch.from_numpy(file.raw(tensor) if is_kept else file.read(tensor))
            if config.architecture == LLAMA and (heads := _rotated_heads(name, config)):
                value = _halves_from_pairs(value, heads)
            if is_kept and kind is not None:
                yield _Read(name, QuantizedWeight(value, kind), tensor.num_bytes)
            else:
                yield _Read(name, value, tensor.num_bytes)


def _hf_name(name: str) -> str:
    """A name that is not known stays as it is, and is refused under it."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _GGUF_LAYER_NAMES:
        return f"model.layers.{match[1]}.{_GGUF_LAYER_NAMES[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_GGUF_NAMES[stem]}.{kind}" if stem in _GGUF_NAMES else name


def _rotated_heads(name: str, config: ModelConfig) -> int:
    """How many heads' rows the tensor has that RoPE rotates; 0 for any other tensor."""
    if ".q_proj." in name:
        return config.num_heads
    return config.num_kv_heads if ".k_proj." in name else 0


def _halves_from_pairs(value: Tensor, num_heads: int) -> Tensor:
    if value.shape[0] % (2 * num_heads) != 0:
        return value  # refused for its shape
    pairs = value.view(num_heads, value.shape[0] // num_heads // 2, 2, *value.shape[1:])
    return pairs.transpose(1, 2).reshape(value.shape)
