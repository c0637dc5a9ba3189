"""One output's tokens as text, with stop strings. Knows nothing of requests.

text so far   [ shown | held back: may be the start of a stop string ]
"""

from collections.abc import Sequence

from gateway.tokenizer import TextTokenizer


class TextStream:
    """Push tokens, show what push() returns. The pieces joined are the whole text, cut at the stop string that is
    complete first (of those, the longest): however the text is split into tokens, none of it is shown."""

    def __init__(self, tokenizer: TextTokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stream = tokenizer.decode_stream()
        self._stop = tuple(stop)
        self._held = ""
        self._undecoded: list[int] = []
        self.is_stopped = False

    def push(self, token_id: int) -> str:
        """The text that can be shown now. Sets is_stopped once a stop string is complete."""
        text = self._tokenizer.step(self._stream, token_id)
        self._undecoded = [] if text else [*self._undecoded, token_id]
        return self._show(text)

    def finish(self) -> str:
        """What is left when no token follows: held text, and the replacement of an incomplete character."""
        tail = self._tokenizer.decode(self._undecoded) if self._undecoded else ""
        self._undecoded = []
        shown = self._show(tail)
        if self.is_stopped:
            return shown
        rest, self._held = self._held, ""
        return shown + rest

    def _show(self, text: str) -> str:
        if self.is_stopped:
            return ""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            self._held = ""
            _, start = min(found)
            return text[:start]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
