"""A model's shape from a GGUF file's metadata. Knows nothing of tensors' values, imports no torch."""

from core.errors import ModelLoadError
from engine.gguf_file import GGUFFile
from engine.json_fields import JsonFields
from engine.model_shape import ModelConfig, RopeKind, RopeScaling

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_gguf_config(file: GGUFFile) -> ModelConfig:
    """Without a fingerprint. Raises ModelLoadError naming the key that is missing or not supported."""
    kind = str(file.metadata.get("general.architecture", "none"))
    if kind not in ARCHITECTURES:
        raise ModelLoadError(
            f"{file.path}: architecture {kind} is not supported; {', '.join(ARCHITECTURES)} are"
        )
    prefix = kind + "."
    fields = JsonFields(file.path, {key.removeprefix(prefix): value for key, value in file.metadata.items()})
    num_heads, hidden_size = fields.integer("attention.head_count"), fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    _refuse_unsupported(fields, head_dim)
    bos_ids = fields.token_ids("tokenizer.ggml.bos_token_id")
    return ModelConfig(
        architecture=ARCHITECTURES[kind],
        vocab_size=_vocab_size(file),
        hidden_size=hidden_size,
        num_layers=fields.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("feed_forward_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(file, fields),
        context_len=_context_len(fields),
        tie_word_embeddings=HEAD not in file.tensors,
        eos_token_ids=_eos_token_ids(fields),
        bos_token_id=bos_ids[0] if bos_ids else None,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
    )


def _refuse_unsupported(fields: JsonFields, head_dim: int) -> None:
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise ModelLoadError(
            f"{fields.path}: rotating {rotary_dim} of {head_dim} dimensions is not supported"
        )
    if fields.values.get("expert_count", 0):
        raise ModelLoadError(f"{fields.path}: mixtures of experts are not supported")


def _vocab_size(file: GGUFFile) -> int:
    if EMBEDDING not in file.tensors:
        raise ModelLoadError(f"{file.path}: tensor {EMBEDDING} is missing")
    return file.tensors[EMBEDDING].shape[0]


def _rope_scaling(file: GGUFFile, fields: JsonFields) -> RopeScaling | None:
    kind = fields.text("rope.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        return RopeScaling(RopeKind.STORED)
    if kind == "none":
        return None
    if kind == RopeKind.LINEAR:
        return RopeScaling(RopeKind.LINEAR, fields.number("rope.scaling.factor"))
    raise ModelLoadError(f"{file.path}: rope type {kind} is not supported; none and linear are")


def _context_len(fields: JsonFields) -> int:
    context_len = fields.integer("context_length")
    return min(context_len, fields.integer("attention.sliding_window", context_len))


def _eos_token_ids(fields: JsonFields) -> tuple[int, ...]:
    ids = [token_id for key in EOS_KEYS for token_id in fields.token_ids(f"tokenizer.ggml.{key}")]
    return tuple(dict.fromkeys(ids))
