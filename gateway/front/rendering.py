"""Answers without holding up the event loop: what has many log-probabilities is made in a thread, a choice at a time.
Knows no protocol."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from gateway.text_generation import TextChunk

MAX_INLINE = 2048
"""Log-probabilities, at some 10 µs. A loop that stalls delays everybody's tokens, and in seconds breaks sessions."""
Rendered = TypeVar("Rendered")


async def rendered(make: Callable[[], Rendered], chunks: Sequence[TextChunk]) -> Rendered:
    """make(), which turns these chunks of one choice into what a client gets; perhaps without an event loop."""
    if num_logprobs(chunks) <= MAX_INLINE:
        return make()
    return await asyncio.to_thread(make)


def num_logprobs(chunks: Sequence[TextChunk]) -> int:
    """That these chunks may tell, of the prompt's tokens and the output's."""
    scores = [score for chunk in chunks if chunk.prompt is not None for score in chunk.prompt.scores[:1]]
    of_prompts = sum(len(chunk.prompt.scores) for chunk in chunks if chunk.prompt is not None)
    of_outputs = sum(1 + len(token.top) for chunk in chunks for token in chunk.tokens)
    return of_prompts * (1 + max((len(score.top) for score in scores), default=0)) + of_outputs
