"""Reading what a model is, from a Hugging Face directory or a GGUF file. Knows nothing of tensors and imports no
torch."""

from dataclasses import replace
from pathlib import Path

from core.errors import ModelLoadError
from core.kv_spec import DType, KVSpec
from engine.fingerprint import fingerprint_files
from engine.gguf_config import read_gguf_config
from engine.gguf_file import GGUFFile
from engine.hf_config import read_hf_config, weight_files
from engine.model_shape import ModelConfig, RopeKind, RopeScaling

__all__ = [
    "ModelConfig",
    "ModelLoadError",
    "RopeKind",
    "RopeScaling",
    "kv_spec",
    "load_model_config",
]


def load_model_config(path: Path) -> ModelConfig:
    """With the fingerprint, so it reads the weights' bytes once. Raises ModelLoadError naming the file and what is
    wrong with it."""
    try:
        if path.is_dir():
            config, files = read_hf_config(path), weight_files(path)
        else:
            with GGUFFile(path) as file:
                config, files = read_gguf_config(file), [path]
        _check_shape(path, config)
        return replace(config, fingerprint=fingerprint_files(config.description(), files))
    except OSError as error:
        raise ModelLoadError(f"{path}: {error.strerror or error}") from error


def _check_shape(path: Path, config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads != 0:
        raise ModelLoadError(f"{path}: {config.num_heads} heads cannot share {config.num_kv_heads} KV heads")
    if config.head_dim % 2 != 0:
        raise ModelLoadError(f"{path}: head_dim {config.head_dim} is odd")


def kv_spec(config: ModelConfig, block_size: int, dtype: DType) -> KVSpec:
    return KVSpec(
        config.num_layers, config.num_kv_heads, config.head_dim, block_size, dtype, config.fingerprint
    )
