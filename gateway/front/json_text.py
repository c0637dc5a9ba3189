"""JSON as clients get it. Python's encoder holds the interpreter's lock to its end: a thread that writes something
large lets others run only between its pieces."""

import json
from collections.abc import Iterator
from typing import Any

PIECE_LEN = 256
"""Elements of a list that are written at once."""


def compact_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def large_json(value: Any) -> str:
    """The same text, written piece by piece: slower."""
    return "".join(_pieces(value))


def _pieces(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for at, (key, part) in enumerate(value.items()):
            yield f"{',' if at else '{'}{compact_json(key)}:"
            yield from _pieces(part)
        yield "}"
    elif isinstance(value, list) and len(value) > PIECE_LEN:
        for start in range(0, len(value), PIECE_LEN):
            yield f"{',' if start else '['}{compact_json(value[start : start + PIECE_LEN])[1:-1]}"
        yield "]"
    elif isinstance(value, list) and any(isinstance(part, dict) for part in value):
        for at, part in enumerate(value):
            yield "," if at else "["
            yield from _pieces(part)
        yield "]"
    else:
        yield compact_json(value)
