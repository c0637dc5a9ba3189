"""What OpenAI clients get back: whole answers, stream chunks, errors. Plain dictionaries ready for JSON."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from core.errors import (
    Busy,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    TandemError,
    Unauthenticated,
    Unavailable,
)
from gateway.answer import Answer, Usage
from gateway.ask import Ask
from gateway.front.chat_objects import ChatShape
from gateway.front.json_text import compact_json, large_json
from gateway.front.logprobs import CompletionLogprobs, prompt_part
from gateway.front.rendering import rendered
from gateway.text.tokenizer import TextTokenizer
from gateway.text_generation import TextChunk

Json = dict[str, Any]
MAX_MESSAGE_LEN = 1000
"""Of an error, which may repeat what its client sent."""


class CompletionShape:
    """/v1/completions: text. One for each answer."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(self, tokenizer: TextTokenizer, ask: Ask) -> None:
        self._tokenizer = tokenizer
        self._logprobs = (
            [CompletionLogprobs(tokenizer) for _ in range(ask.num_choices)] if ask.wants_logprobs else []
        )
        self._echoes = ask.echoes

    def opening(self, choice: int) -> Json | None:
        return None

    def parts(self, chunk: TextChunk) -> list[Json]:
        return [self._choice([chunk])]

    def whole(self, chunks: Sequence[TextChunk]) -> Json:
        return self._choice(chunks)

    def _choice(self, chunks: Sequence[TextChunk]) -> Json:
        first, last = chunks[0], chunks[-1]
        echoed = first.prompt if self._echoes else None
        logprobs = None
        if self._logprobs:
            tokens = [token for chunk in chunks for token in chunk.tokens]
            logprobs = self._logprobs[first.choice].of(tokens, echoed)
        return {
            "index": first.choice,
            "text": (echoed.text if echoed else "") + "".join(chunk.text for chunk in chunks),
            "logprobs": logprobs,
            "finish_reason": last.finish_reason or None,
            "stop_reason": last.stop_reason,
            **prompt_part(self._tokenizer, first),
        }


Shape = CompletionShape | ChatShape


class Envelope:
    """What every object of one request shares: id, creation time, model."""

    def __init__(self, shape: Shape, answer: Answer, model: str) -> None:
        self.shape = shape
        self._answer = answer
        self._common = {
            "id": f"{shape.prefix}-{answer.request_id}",
            "created": int(time.time()),
            "model": model,
        }

    def chunk(self, choice: Json | None, usage: Json) -> Json:
        """`usage` is empty, or what the chunk says of it."""
        choices = [choice] if choice else []
        return {**self._common, "object": self.shape.chunk_kind, "choices": choices, **usage}

    def usage(self) -> Json:
        """As it is now."""
        return {"usage": usage_object(self._answer.usage)}

    async def whole(self, choices: Sequence[Sequence[TextChunk]], has_timing: bool = False) -> bytes:
        """The answer's JSON, made a choice at a time."""
        bodies = [await rendered(partial(self._whole_choice, chunks), chunks) for chunks in choices]
        head = compact_json({**self._common, "object": self.shape.kind}).encode()
        timing = {"timing": self.timing()} if has_timing else {}
        tail = compact_json({**self.usage(), **timing}).encode()
        return b"".join((head[:-1], b',"choices":[', b",".join(bodies), b"],", tail[1:]))

    def _whole_choice(self, chunks: Sequence[TextChunk]) -> bytes:
        return large_json(self.shape.whole(chunks)).encode()

    def timing(self, choice: int = 0) -> Json:
        return asdict(self._answer.timing(choice))


def usage_object(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


def error_object(error: TandemError) -> Json:
    is_theirs = isinstance(error, InvalidRequest | ModelNotFound | Unauthenticated)
    return {
        "error": {
            "message": str(error)[:MAX_MESSAGE_LEN],
            "type": "invalid_request_error" if is_theirs else error.code.value,
            "param": error.field if isinstance(error, InvalidRequest | ModelNotFound) else None,
            "code": error.code.value,
        }
    }


def http_status(error: TandemError) -> int:
    match error:
        case ModelNotFound():
            return 404
        case InvalidRequest():
            return 400
        case Unauthenticated():
            return 401
        case Busy():
            return 429
        case DeadlineExceeded():
            return 504
        case Cancelled():
            return 499
        case Unavailable():
            return 503
    return 503 if error.retryable else 500
