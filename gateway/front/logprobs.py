"""Log-probabilities as OpenAI's objects have them. Knows nothing of requests.

A token that is no whole characters is spelled `bytes:\\xe2\\x80`, so that no two of one place are spelled alike.
"""

import codecs
from collections.abc import Sequence
from typing import Any

from core.sampling import Top
from core.scores import PromptScore
from gateway.generation import OutputToken
from gateway.text.tokenizer import TextTokenizer
from gateway.text_generation import EchoedPrompt, TextChunk

Json = dict[str, Any]
LEAST = -9999.0
"""Stands for the logarithm of 0, which JSON cannot say."""


class ChatLogprobs:
    """`logprobs` of a chat's choice: an object for each token."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def of(self, tokens: Sequence[OutputToken]) -> Json:
        content = [
            {
                **self._one(token.token_id, token.logprob),
                "top_logprobs": [self._one(*pair) for pair in token.top],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _one(self, token_id: int, logprob: float) -> Json:
        spelled = self._tokenizer.token_bytes(token_id)
        return {"token": name(spelled), "logprob": max(logprob, LEAST), "bytes": list(spelled)}


class CompletionLogprobs:
    """`logprobs` of one completion choice: parallel lists, whose offsets count characters of the choice's text."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def of(self, tokens: Sequence[OutputToken], echoed: EchoedPrompt | None = None) -> Json:
        """Of tokens that follow those of the call before; `echoed` comes before all. Its first token has no
        probability."""
        entries: list[tuple[int, float | None, Top]] = []
        if echoed is not None:
            first, *rest = echoed.token_ids
            entries.append((first, None, ()))
            entries += [
                (token, score.logprob, score.top) for token, score in zip(rest, echoed.scores, strict=True)
            ]
        entries += [(token.token_id, token.logprob, token.top) for token in tokens]
        return {
            "tokens": [self._name(token_id) for token_id, _, _ in entries],
            "token_logprobs": [None if logprob is None else max(logprob, LEAST) for _, logprob, _ in entries],
            "top_logprobs": [self._top(*entry) for entry in entries],
            "text_offset": [self._advance(token_id) for token_id, _, _ in entries],
        }

    def _top(self, token_id: int, logprob: float | None, top: Top) -> dict[str, float] | None:
        """The likeliest, and the token itself if it is none of them."""
        if logprob is None:
            return None
        return {self._name(own): max(value, LEAST) for own, value in (*top, (token_id, logprob))}

    def _name(self, token_id: int) -> str:
        return name(self._tokenizer.token_bytes(token_id))

    def _advance(self, token_id: int) -> int:
        """The offset of a token; the next one's is after it."""
        offset = self._offset
        if not self._tokenizer.is_control(token_id):
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return offset


def prompt_part(tokenizer: TextTokenizer, chunk: TextChunk) -> Json:
    """`prompt_logprobs` where they were asked for."""
    if chunk.prompt is None or not chunk.prompt.scores:
        return {}
    return {"prompt_logprobs": prompt_logprobs(tokenizer, chunk.prompt)}


def prompt_logprobs(tokenizer: TextTokenizer, prompt: EchoedPrompt) -> list[Json | None]:
    """vLLM's `prompt_logprobs`: an object by token id for each place; the first one has none."""
    _, *rest = prompt.token_ids
    return [
        None,
        *(_scored(tokenizer, token, score) for token, score in zip(rest, prompt.scores, strict=True)),
    ]


def _scored(tokenizer: TextTokenizer, token_id: int, score: PromptScore) -> Json:
    ranked = [(own, logprob, rank) for rank, (own, logprob) in enumerate(score.top, 1)]
    return {
        str(own): {
            "logprob": max(logprob, LEAST),
            "rank": rank,
            "decoded_token": name(tokenizer.token_bytes(own)),
        }
        for own, logprob, rank in (*ranked, (token_id, score.logprob, score.rank))
    }


def name(spelled: bytes) -> str:
    """A token's bytes as text."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
