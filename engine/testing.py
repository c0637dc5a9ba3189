"""Tiny random-weight models as Hugging Face directories, for tests. Knows nothing of who loads them.

Nothing that serves imports this module: an engine itself never runs with weights that were not in its files.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from engine.hf_config import LLAMA, MISTRAL, QWEN2, QWEN3, read_hf_config
from engine.weights import expected_shapes

ARCHITECTURES = {"llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3}
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NUM_BYTES = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny_model(directory: Path, architecture: str = "llama", seed: int = 0, **overrides: Any) -> Path:
    """Writes config.json, model.safetensors, tokenizer.json and tokenizer_config.json and returns the directory.
    `architecture` is a key of ARCHITECTURES; `overrides` replace fields of config.json. Token ids below 256 are
    bytes, the next three SPECIAL_TOKENS (the last ends a turn), the rest spell `<unused-N>`. The same seed gives
    the same weights."""
    directory.mkdir(parents=True, exist_ok=True)
    values = _config_values(architecture) | overrides
    _write_json(directory / "config.json", values)
    save_file(_random_weights(directory, seed), directory / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(directory, int(values["vocab_size"]))
    return directory


def _config_values(architecture: str) -> dict[str, Any]:
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": NUM_BYTES,
        "eos_token_id": NUM_BYTES + 2,
        "torch_dtype": "float32",
    }
    return values | ({"use_sliding_window": False} if architecture.startswith("qwen") else {})


def _random_weights(directory: Path, seed: int) -> dict[str, Tensor]:
    """Large enough for logits that differ by more than rounding, norms near one."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_shapes(read_hf_config(directory)).items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.1 * noise if "norm" in name else noise * (1.5 * shape[-1] ** -0.5)
    return weights


def _write_tokenizer(directory: Path, vocab_size: int) -> None:
    tokenizer = Tokenizer(models.BPE(vocab=_vocabulary(vocab_size), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(directory / "tokenizer_config.json", config)


def _vocabulary(vocab_size: int) -> dict[str, int]:
    """The byte alphabet in byte order, the special tokens, then fillers."""
    bytes_in_order = [_byte_symbol(value) for value in range(NUM_BYTES)]
    fillers = [f"<unused-{index}>" for index in range(vocab_size - NUM_BYTES - len(SPECIAL_TOKENS))]
    return {token: index for index, token in enumerate([*bytes_in_order, *SPECIAL_TOKENS, *fillers])}


def _byte_symbol(value: int) -> str:
    """GPT-2's printable stand-in: printable Latin-1 bytes are themselves, the others count up from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if value in printable:
        return chr(value)
    return chr(NUM_BYTES + sum(1 for other in range(value) if other not in printable))


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2), encoding="utf-8")
