"""/v1/chat/completions: messages, and deltas of them. Plain dictionaries ready for JSON."""

from collections.abc import Sequence
from typing import Any

from gateway.ask import Ask
from gateway.front.logprobs import ChatLogprobs, prompt_part
from gateway.text.tokenizer import TextTokenizer
from gateway.text.tool_calls import CallDelta, joined_calls
from gateway.text_generation import TextChunk

Json = dict[str, Any]


class ChatShape:
    """One for each answer. In a stream the role comes first; each part of a call is a delta of its own."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, tokenizer: TextTokenizer, ask: Ask) -> None:
        self._tokenizer = tokenizer
        self._logprobs = ChatLogprobs(tokenizer) if ask.wants_logprobs else None
        self._may_call = any(
            prompt.chat is not None and prompt.chat.tools is not None for prompt in ask.prompts
        )

    def opening(self, choice: int) -> Json | None:
        """An answer that may turn out to be calls has no content yet."""
        delta = {"role": "assistant", "content": None if self._may_call else ""}
        return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}

    def parts(self, chunk: TextChunk) -> list[Json]:
        deltas: list[Json] = [{"content": chunk.text}] if chunk.text else []
        deltas += [{"tool_calls": [_call_delta(call)]} for call in chunk.calls]
        *others, last = deltas or [{}]
        nothing_more = {"logprobs": None, "finish_reason": None}
        return [
            *({"index": chunk.choice, "delta": delta, **nothing_more} for delta in others),
            {"index": chunk.choice, "delta": last, **self._end([chunk])},
        ]

    def whole(self, chunks: Sequence[TextChunk]) -> Json:
        text = "".join(chunk.text for chunk in chunks)
        calls = joined_calls(call for chunk in chunks for call in chunk.calls)
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": list(map(_whole_call, calls))}
        return {"index": chunks[0].choice, "message": message, **self._end(chunks)}

    def _end(self, chunks: Sequence[TextChunk]) -> Json:
        logprobs = None
        if self._logprobs is not None:
            logprobs = self._logprobs.of([token for chunk in chunks for token in chunk.tokens])
        return {
            "logprobs": logprobs,
            "finish_reason": chunks[-1].finish_reason or None,
            "stop_reason": chunks[-1].stop_reason,
            **prompt_part(self._tokenizer, chunks[0]),
        }


def _call_delta(call: CallDelta) -> Json:
    if not call.call_id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_whole_call(call)}


def _whole_call(call: CallDelta) -> Json:
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
