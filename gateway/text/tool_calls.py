"""Calls of functions in one output's text, as it comes. Knows nothing of requests.

text so far   [ content or calls, told | held back: may become a call ]

What is no call after all is content, whole: nothing is lost and nothing is an error. So is a call of a function that
there is not.
"""

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from gateway.text.call_body import BodyState, CallBody
from gateway.text.text_stream import overlap
from gateway.text.tool_format import ToolFormat

MAX_HELD_SPACE = 64


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What is new of one call of a choice, which are counted from 0. The first of each has its id and its name, and
    no arguments; the arguments of all joined are JSON, if the model wrote it right and to its end."""

    index: int
    arguments: str = ""
    call_id: str = ""
    name: str = ""


@dataclass(slots=True)
class Parsed:
    """Content that follows the content before, and what is new of calls."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class ToolCallParser:
    """Push text, tell what push() returns; finish() at the end. Is `done` after the first call unless there may be
    several."""

    def __init__(self, form: ToolFormat, names: frozenset[str], allows_several: bool = True) -> None:
        self._form = form
        self._names = names
        self._allows_several = allows_several
        self._rest = ""
        self._marker = ""
        self._body = CallBody(names)
        self._read: Callable[[Parsed], bool] = self._read_start if form.may_be_bare else self._read_content
        self.num_calls = 0
        self.is_done = False

    def push(self, text: str) -> Parsed:
        self._rest += text
        parsed = Parsed()
        while not self.is_done and self._read(parsed):
            pass
        return parsed

    def finish(self) -> Parsed:
        """What was held back, as content. A call that was begun stays as far as it got."""
        if self.is_done or self._read in (self._read_after, self._read_next):
            return Parsed()
        if self._read == self._read_body:
            return Parsed(self._marker + self._body.text if self._body.state is not BodyState.CALL else "")
        return Parsed("" if self.num_calls and self._rest.isspace() else self._rest)

    # Each of these reads one part of the text, and returns False when that needs more of it.

    def _read_start(self, parsed: Parsed) -> bool:
        """An output's first character says whether it begins with a bare call."""
        begun = self._rest.lstrip()
        if not begun and len(self._rest) <= MAX_HELD_SPACE:
            return False
        if begun.startswith("{"):
            self._begin_body("")
        else:
            self._read = self._read_content
        return True

    def _read_content(self, parsed: Parsed) -> bool:
        """Up to a call; space before one is no content, but before what turns out to be none."""
        before, marker, after = self._rest.partition(self._form.opening)
        if marker:
            told = before.rstrip()
            parsed.content += told
            self._rest = after
            self._begin_body(before[len(told) :] + marker)
            return True
        told = before[: len(before) - overlap(before, self._form.opening)]
        spaceless = told.rstrip()
        if len(told) - len(spaceless) <= MAX_HELD_SPACE:
            told = spaceless
        parsed.content += told
        self._rest = before[len(told) :]
        return False

    def _read_body(self, parsed: Parsed) -> bool:
        was_call = self._body.state is BodyState.CALL
        self._body.push(self._rest)
        self._rest = ""
        if self._body.state is BodyState.REFUSED:
            end = self._body.end or 0  # what was only begun is read again: it may have a call in it
            parsed.content += self._marker + self._body.text[:end]
            self._rest = self._body.text[end:]
            self._read = self._read_content
            return True
        if self._body.state is BodyState.CALL:
            self._tell_call(parsed, is_new=not was_call)
        if self._body.end is None:
            return False
        self._rest = self._body.text[self._body.end :]
        self._read = self._read_after
        self.is_done = not self._allows_several
        return True

    def _tell_call(self, parsed: Parsed, is_new: bool) -> None:
        if is_new:
            self.num_calls += 1
            call_id = f"call_{secrets.token_hex(12)}"
            parsed.calls.append(CallDelta(self.num_calls - 1, "", call_id, self._body.name))
        if arguments := self._body.take_arguments():
            parsed.calls.append(CallDelta(self.num_calls - 1, arguments))

    def _read_after(self, parsed: Parsed) -> bool:
        """What closes a call."""
        self._rest = self._rest.lstrip()
        closing = self._form.closing
        if closing.startswith(self._rest) and self._rest != closing:
            return False
        self._rest = self._rest.removeprefix(closing)
        self._read = self._read_next
        return True

    def _read_next(self, parsed: Parsed) -> bool:
        """Another call, or content."""
        self._rest = self._rest.lstrip(self._form.separators + " \t\r\n")
        if not self._rest:
            return False
        if self._form.may_be_bare and self._rest.startswith("{"):
            self._begin_body("")
        else:
            self._read = self._read_content
        return True

    def _begin_body(self, marker: str) -> None:
        self._marker = marker
        self._body = CallBody(self._names)
        self._read = self._read_body


def joined_calls(deltas: Iterable[CallDelta]) -> list[CallDelta]:
    """One for each call, in order, with what these say of it."""
    calls: dict[int, CallDelta] = {}
    for delta in deltas:
        had = calls.get(delta.index)
        calls[delta.index] = delta if had is None else replace(had, arguments=had.arguments + delta.arguments)
    return list(calls.values())
