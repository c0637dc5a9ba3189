"""One output's tokens as text, with stop strings. Knows nothing of requests.

text so far   [ shown | held back: may be the start of a stop string ]
"""

from gateway.ask import PLAIN, TextOptions
from gateway.text.tokenizer import TextTokenizer


class TextStream:
    """Push tokens, show what push() returns. The pieces joined are the whole text, cut at the stop string that is
    complete first (of those, the longest): however the text is split into tokens, none of it is shown (or, with
    includes_stop, all of it and nothing after). What the first `min_tokens` tokens say is no part of a stop string.
    `matched` is the one that ended the text."""

    def __init__(self, tokenizer: TextTokenizer, options: TextOptions = PLAIN, min_tokens: int = 0) -> None:
        self._options = options
        self._decoded = tokenizer.decode_stream(options.skips_special_tokens, options.tells_calls)
        self._num_exempt = min_tokens
        self._held = ""
        self.matched = ""

    @property
    def is_stopped(self) -> bool:
        return bool(self.matched)

    def push(self, token_id: int, is_stop_token: bool = False) -> str:
        """The text that can be shown now. A stop token's own text is part of it with includes_stop only."""
        if is_stop_token and not self._options.includes_stop:
            return ""
        text = self._decoded.push(token_id)
        self._num_exempt -= 1
        return text if self._num_exempt >= 0 else self._show(text)

    def finish(self) -> str:
        """What is left when no token follows: held text, and the replacement of an incomplete character."""
        shown = self._show(self._decoded.finish())
        if self.is_stopped:
            return shown
        rest, self._held = self._held, ""
        return shown + rest

    def _show(self, text: str) -> str:
        if self.is_stopped:
            return ""
        text, stops = self._held + text, self._options.stop
        found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
        if found:
            end, start = min(found)
            self.matched = text[start:end]
            self._held = ""
            return text[: end if self._options.includes_stop else start]
        keep = max((overlap(text, stop) for stop in stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
