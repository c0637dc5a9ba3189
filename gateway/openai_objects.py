"""What OpenAI clients get back: whole answers, stream chunks, errors. Plain dictionaries ready for JSON."""

import time
from dataclasses import asdict
from typing import Any

from core.errors import (
    Busy,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    TandemError,
    Unavailable,
)
from gateway.serving import TextChunk, TextGeneration, Usage

Json = dict[str, Any]


class CompletionShape:
    """/v1/completions: text."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def opening(self) -> Json | None:
        return None

    def part(self, chunk: TextChunk) -> Json:
        return {
            "index": 0,
            "text": chunk.text,
            "logprobs": None,
            "finish_reason": chunk.finish_reason or None,
        }

    def whole(self, text: str, finish_reason: str) -> Json:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}


class ChatShape:
    """/v1/chat/completions: messages and deltas; the role comes first."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self) -> Json | None:
        return self._choice({"role": "assistant", "content": ""}, None)

    def part(self, chunk: TextChunk) -> Json:
        return self._choice({"content": chunk.text} if chunk.text else {}, chunk.finish_reason or None)

    def whole(self, text: str, finish_reason: str) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}

    def _choice(self, delta: Json, finish_reason: str | None) -> Json:
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


Shape = CompletionShape | ChatShape


class Envelope:
    """What every object of one request shares: id, creation time, model."""

    def __init__(self, shape: Shape, generation: TextGeneration, model: str) -> None:
        self.shape = shape
        self._generation = generation
        self._common = {
            "id": f"{shape.prefix}-{generation.request_id}",
            "created": int(time.time()),
            "model": model,
        }

    def chunk(self, choice: Json | None, with_usage_field: bool) -> Json:
        extra = {"usage": None} if with_usage_field else {}
        return {
            **self._common,
            "object": self.shape.chunk_kind,
            "choices": [choice] if choice else [],
            **extra,
        }

    def usage_chunk(self) -> Json:
        return {**self.chunk(None, False), "usage": usage_object(self._generation.usage)}

    def whole(self, text: str, finish_reason: str) -> Json:
        return {
            **self._common,
            "object": self.shape.kind,
            "choices": [self.shape.whole(text, finish_reason)],
            "usage": usage_object(self._generation.usage),
        }

    def timing(self) -> Json:
        return asdict(self._generation.timing)


def usage_object(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


def error_object(error: TandemError) -> Json:
    is_theirs = isinstance(error, InvalidRequest | ModelNotFound)
    return {
        "error": {
            "message": str(error),
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
        case Busy():
            return 429
        case DeadlineExceeded():
            return 504
        case Cancelled():
            return 499
        case Unavailable():
            return 503
    return 503 if error.retryable else 500
