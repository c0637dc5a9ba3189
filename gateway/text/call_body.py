"""The JSON object that is one call, as its text comes: whose it is, and where its arguments begin and end.

    {"name": "f", "arguments": {"a": 1}}
    └ head, undecided ────────┘└ told as it comes ┘

An object whose keys come in another order is undecided until it is whole. Each character is looked at once.
"""

import json
import re
from enum import Enum
from typing import Any

MAX_HEAD = 512
_KEYS = frozenset({"name", "arguments", "parameters", "type", "function", "id"})
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_NAME = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"')
_FIRST_KEY = re.compile(r'\s*\{\s*"([^"\\]*)"')
_NO_OBJECT = re.compile(r"\s*[^\s{]")


class BodyState(Enum):
    """UNDECIDED: may be a call. CALL: is one, of `name`. REFUSED: is none."""

    UNDECIDED = "undecided"
    CALL = "call"
    REFUSED = "refused"


class CallBody:
    """Push text until `end` is known, or the text ends. `text` is all of it that take_arguments() has not told, also
    what follows the object."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self.state = BodyState.UNDECIDED
        self.text = ""
        self.name = ""
        self.end: int | None = None
        """Where the object ends, or where what follows cannot be its end."""
        self._at = 0
        self._depth = 0
        self._is_string = self._is_escaped = self._is_after_arguments = False
        self._arguments_at: int | None = None
        self._arguments_end: int | None = None
        self._whole_arguments = ""

    def push(self, text: str) -> None:
        self.text += text
        if self.state is BodyState.UNDECIDED and self._at <= MAX_HEAD:
            self._read_head()
        if self.state is not BodyState.REFUSED:
            self._scan()
        if self.state is BodyState.UNDECIDED and self.end is not None:
            self._read_whole(self.text[: self.end])

    def take_arguments(self) -> str:
        """What is new of a call's arguments; `text` and `end` then begin behind that."""
        if self._arguments_at is None:
            new, self._whole_arguments = self._whole_arguments, ""
            return new
        told = self._at if self._arguments_end is None else self._arguments_end
        new = self.text[self._arguments_at : told]
        self.text = self.text[told:]
        self._at -= told
        self._arguments_at = 0
        self._arguments_end = None if self._arguments_end is None else 0
        self.end = None if self.end is None else self.end - told
        return new

    def _read_head(self) -> None:
        if match := _HEAD.match(self.text):
            self._decide(match[1])
            self._arguments_at = match.end()
        elif match := _NAME.match(self.text):
            if match[1] not in self._names:
                self.state = BodyState.REFUSED
        elif ((match := _FIRST_KEY.match(self.text)) and match[1] not in _KEYS) or _NO_OBJECT.match(
            self.text
        ):
            self.state = BodyState.REFUSED

    def _scan(self) -> None:
        while self._at < len(self.text) and self.end is None:
            character = self.text[self._at]
            if self._is_after_arguments and not character.isspace():
                self._is_after_arguments = False
                if character not in ",}":
                    self.end = self._at  # the brace that is missing here belongs to nobody else
                    return
            self._at += 1
            self._step(character)

    def _step(self, character: str) -> None:
        if self._is_string:
            self._is_string = character != '"' or self._is_escaped
            self._is_escaped = character == "\\" and not self._is_escaped
        elif character == '"':
            self._is_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth <= 0:
                self.end = self._at
            elif self._depth == 1 and self._is_in_arguments:
                self._arguments_end = self._at
                self._is_after_arguments = True

    @property
    def _is_in_arguments(self) -> bool:
        return self._arguments_at is not None and self._arguments_end is None

    def _read_whole(self, text: str) -> None:
        name, arguments = _read_call(text)
        if name is None or arguments is None:
            self.state = BodyState.REFUSED
            return
        self._decide(name)
        self._whole_arguments = arguments

    def _decide(self, name: str) -> None:
        self.name = name
        self.state = BodyState.CALL if name in self._names else BodyState.REFUSED


def _read_call(text: str) -> tuple[str | None, str | None]:
    """Name and arguments of a call whose keys come in any order; arguments may be JSON in a string."""
    try:
        call = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None, None
    if isinstance(call.get("function"), dict):
        call = call["function"]
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
    return (name if isinstance(name, str) else None), _arguments_text(arguments)


def _arguments_text(arguments: Any) -> str | None:
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        text.encode()  # half a surrogate pair, escaped, is JSON and no text
        return text if isinstance(json.loads(text), dict) else None
    except (ValueError, RecursionError):
        return None
