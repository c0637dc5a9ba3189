"""Typed reads of one JSON object, with errors that name the file and the field. Knows nothing of models."""

import json
from pathlib import Path
from typing import Any

from core.errors import ModelLoadError


def read_json(path: Path) -> dict[str, Any]:
    """Raises ModelLoadError when the file is missing or holds no object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} is missing") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} holds no JSON object")
    return values


class JsonFields:
    """A null value counts as absent. Without a default, absence is an error."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = {key: value for key, value in values.items() if value is not None}

    @classmethod
    def of(cls, path: Path) -> "JsonFields":
        return cls(path, read_json(path))

    def require(self, key: str) -> Any:
        if key not in self.values:
            raise ModelLoadError(f"{self.path}: `{key}` is missing")
        return self.values[key]

    def number(self, key: str, default: float | None = None) -> float:
        """Positive."""
        value = self.require(key) if default is None else self.values.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise ModelLoadError(f"{self.path}: `{key}` must be a positive number, not {value!r}")
        return float(value)

    def integer(self, key: str, default: int | None = None) -> int:
        """Positive."""
        value = self.number(key, default)
        if not value.is_integer():
            raise ModelLoadError(f"{self.path}: `{key}` must be an integer, not {value!r}")
        return int(value)

    def flag(self, key: str) -> bool:
        return bool(self.values.get(key, False))

    def text(self, key: str, default: str) -> str:
        return str(self.values.get(key, default))

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise ModelLoadError(f"{self.path}: `{key}` must be an object, not {value!r}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """None, one or several ids, however the file spells it."""
        value = self.values.get(key, [])
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and item >= 0 for item in items):
            raise ModelLoadError(f"{self.path}: `{key}` must be a token id or a list of them, not {value!r}")
        return tuple(items)
