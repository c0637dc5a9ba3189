"""A model's shape, vocabulary ids and identity as plain values. Knows nothing of files or tensors."""

from dataclasses import dataclass, replace
from enum import StrEnum


class RopeKind(StrEnum):
    """How rotary frequencies are scaled. STORED: divided by the file's own `rope_freqs.weight`."""

    LINEAR = "linear"
    LLAMA3 = "llama3"
    STORED = "stored"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """The last three fields are used by LLAMA3 only."""

    kind: RopeKind
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_len: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family. `attention_bias`: q, k and v have biases; `output_bias`: so does o;
    `qk_norm`: q and k are normalised per head before rotation. A sliding window caps `context_len`: up to it,
    windowed and full attention are the same."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    context_len: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    attention_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    fingerprint: str = ""

    def description(self) -> str:
        """Every field but the fingerprint, the same text for the same values."""
        return repr(replace(self, fingerprint=""))
