"""A model's shape from a Hugging Face directory. Knows nothing of tensors, imports no torch."""

from pathlib import Path

from core.errors import ModelLoadError
from engine.json_fields import JsonFields, read_json
from engine.model_shape import ModelConfig, RopeKind, RopeScaling

LLAMA, MISTRAL, QWEN2, QWEN3 = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
ARCHITECTURES = (LLAMA, MISTRAL, QWEN2, QWEN3)
INDEX_NAME = "model.safetensors.index.json"


def read_hf_config(directory: Path) -> ModelConfig:
    """From config.json and generation_config.json, without a fingerprint."""
    fields = JsonFields.of(directory / "config.json")
    architecture = _architecture(fields)
    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    bos_ids = fields.token_ids("bos_token_id")
    has_bias = fields.flag("attention_bias")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden_size // num_heads),
        intermediate_size=fields.integer("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=_rope_fields(fields).number("rope_theta", fields.number("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(_rope_fields(fields)),
        context_len=_context_len(fields),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        eos_token_ids=_eos_token_ids(fields, directory / "generation_config.json"),
        bos_token_id=bos_ids[0] if bos_ids else None,
        attention_bias=architecture == QWEN2 or has_bias,
        output_bias=architecture != QWEN2 and has_bias,
        qk_norm=architecture == QWEN3,
    )


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files, in the order of their index or names. Raises ModelLoadError if one is missing."""
    index = directory / INDEX_NAME
    if index.is_file():
        names = JsonFields.of(index).mapping("weight_map").values()
        paths = [directory / str(name) for name in dict.fromkeys(names)]
    else:
        paths = sorted(directory.glob("*.safetensors"))
    for path in paths:
        if not path.is_file():
            raise ModelLoadError(f"{index} names {path.name}, which is missing")
    if not paths:
        raise ModelLoadError(f"{directory}: no *.safetensors file (other weight formats are not read)")
    return paths


def _architecture(fields: JsonFields) -> str:
    names = fields.require("architectures")
    name = str(names[0]) if isinstance(names, list) and names else str(names)
    if name not in ARCHITECTURES:
        raise ModelLoadError(
            f"{fields.path}: architecture {name} is not supported; {', '.join(ARCHITECTURES)} are"
        )
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise ModelLoadError(f"{fields.path}: `hidden_act` {activation} is not supported; silu is")
    for key in ("mlp_bias", "quantization_config"):
        if fields.values.get(key):
            raise ModelLoadError(f"{fields.path}: `{key}` is not supported")
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise ModelLoadError(f"{fields.path}: `partial_rotary_factor` is not supported")
    return name


def _rope_fields(fields: JsonFields) -> JsonFields:
    """transformers 5 writes `rope_parameters` (theta included), earlier ones `rope_theta` and `rope_scaling`."""
    key = "rope_parameters" if "rope_parameters" in fields.values else "rope_scaling"
    return JsonFields(fields.path, fields.mapping(key))


def _rope_scaling(rope: JsonFields) -> RopeScaling | None:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return None
    if kind == RopeKind.LINEAR:
        return RopeScaling(RopeKind.LINEAR, rope.number("factor"))
    if kind == RopeKind.LLAMA3:
        return RopeScaling(
            RopeKind.LLAMA3,
            rope.number("factor"),
            rope.number("low_freq_factor"),
            rope.number("high_freq_factor"),
            rope.integer("original_max_position_embeddings"),
        )
    raise ModelLoadError(f"{rope.path}: rope type {kind} is not supported; default, linear and llama3 are")


def _context_len(fields: JsonFields) -> int:
    """Qwen2 files carry a sliding window that `use_sliding_window` turns off; elsewhere it counts."""
    context_len = fields.integer("max_position_embeddings", 2048)
    is_windowed = bool(fields.values.get("use_sliding_window", True)) and "sliding_window" in fields.values
    return min(context_len, fields.integer("sliding_window")) if is_windowed else context_len


def _eos_token_ids(fields: JsonFields, generation_path: Path) -> tuple[int, ...]:
    generation = JsonFields(generation_path, read_json(generation_path) if generation_path.is_file() else {})
    return tuple(dict.fromkeys(fields.token_ids("eos_token_id") + generation.token_ids("eos_token_id")))
