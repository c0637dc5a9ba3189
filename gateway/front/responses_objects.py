"""/v1/responses: the response object, and the events of a streamed one. Plain dictionaries ready for JSON.

created, in_progress, then for each item of the output
    output_item.added, content_part.added, output_text.delta ..., output_text.done, content_part.done,
        output_item.done
    output_item.added, function_call_arguments.delta ..., function_call_arguments.done, output_item.done
then completed, incomplete, or failed.
"""

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from core.errors import Busy, TandemError
from gateway.answer import Answer
from gateway.text.tool_calls import CallDelta
from gateway.text_generation import TextChunk

Json = dict[str, Any]


class ResponseWriter:
    """One for each answer: feed it the chunks of its only choice, in order. `output` is what they have become; `echo`
    is what the response says of its request."""

    def __init__(self, answer: Answer, echo: Json, model: str) -> None:
        self.output: list[Json] = []
        self._answer = answer
        self._numbered = 0
        self._is_open = False
        self._reason = ""
        self._common = {
            "id": f"resp_{answer.request_id}",
            "object": "response",
            "created_at": float(int(time.time())),
            "model": model,
            **echo,
        }

    def opening(self) -> Iterator[Json]:
        yield self._event("response.created", response=self.response("in_progress"))
        yield self._event("response.in_progress", response=self.response("in_progress"))

    def events(self, chunk: TextChunk) -> Iterator[Json]:
        if chunk.text:
            yield from self._text(chunk.text)
        for call in chunk.calls:
            yield from self._call(call)
        if chunk.finish_reason:
            self._reason = chunk.finish_reason
            if not self.output:
                yield from self._open_message()
            yield from self._close("incomplete" if self._is_cut_off else "completed")

    def closing(self) -> Iterator[Json]:
        status = "incomplete" if self._is_cut_off else "completed"
        yield self._event(f"response.{status}", response=self.response(status))

    def failing(self, error: TandemError) -> Iterator[Json]:
        """Instead of closing(), after events that were sent already."""
        if self._is_open:
            self.output[-1]["status"] = "incomplete"
        code = "rate_limit_exceeded" if isinstance(error, Busy) else "server_error"
        failed = self.response("failed") | {"error": {"code": code, "message": str(error)}}
        yield self._event("response.failed", response=failed)

    def whole(self, chunks: Sequence[TextChunk]) -> Json:
        for chunk in chunks:
            for _ in self.events(chunk):
                pass
        return self.response("incomplete" if self._is_cut_off else "completed")

    def response(self, status: str) -> Json:
        """As far as it got."""
        is_over = status != "in_progress"
        return {
            **self._common,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [*self.output],
            "usage": self._usage() if is_over else None,
        }

    def timing(self) -> Json:
        return asdict(self._answer.timing())

    @property
    def _is_cut_off(self) -> bool:
        return self._reason == "length"

    def _text(self, text: str) -> Iterator[Json]:
        if not self._is_open or self.output[-1]["type"] != "message":
            yield from self._close()
            yield from self._open_message()
        self.output[-1]["content"][0]["text"] += text
        yield self._of_part("response.output_text.delta", delta=text, logprobs=[])

    def _call(self, call: CallDelta) -> Iterator[Json]:
        if call.call_id:
            yield from self._close()
            yield self._open(
                {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": ""}
            )
        if call.arguments:
            self.output[-1]["arguments"] += call.arguments
            yield self._of_item("response.function_call_arguments.delta", delta=call.arguments)

    def _open_message(self) -> Iterator[Json]:
        yield self._open({"type": "message", "role": "assistant", "content": []})
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.output[-1]["content"] = [part]
        yield self._of_part("response.content_part.added", part=dict(part))

    def _open(self, item: Json) -> Json:
        prefix = "msg" if item["type"] == "message" else "fc"
        self.output.append({"id": f"{prefix}_{secrets.token_hex(16)}", "status": "in_progress", **item})
        self._is_open = True
        return self._event("response.output_item.added", item=dict(self.output[-1]), **self._place())

    def _close(self, status: str = "completed") -> Iterator[Json]:
        if not self._is_open:
            return
        self._is_open = False
        item = self.output[-1]
        item["status"] = status
        if item["type"] == "message":
            (part,) = item["content"]
            yield self._of_part("response.output_text.done", text=part["text"], logprobs=[])
            yield self._of_part("response.content_part.done", part=part)
        else:
            yield self._of_item("response.function_call_arguments.done", arguments=item["arguments"])
        yield self._event("response.output_item.done", item=item, **self._place())

    def _of_part(self, kind: str, **fields: Any) -> Json:
        return self._of_item(kind, content_index=0, **fields)

    def _of_item(self, kind: str, **fields: Any) -> Json:
        return self._event(kind, item_id=self.output[-1]["id"], **self._place(), **fields)

    def _place(self) -> Json:
        return {"output_index": len(self.output) - 1}

    def _event(self, kind: str, **fields: Any) -> Json:
        self._numbered += 1
        return {"type": kind, "sequence_number": self._numbered - 1, **fields}

    def _usage(self) -> Json:
        usage = self._answer.usage
        return {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.num_completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        }
