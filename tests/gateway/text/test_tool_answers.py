"""Answers that call functions, from tokens to OpenAI's objects."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from core.sampling import SamplingParams
from gateway.answer import Answer
from gateway.ask import Ask, Prompt, TextOptions
from gateway.front.chat_objects import ChatShape
from gateway.front.openai_objects import Envelope
from gateway.text.tokenizer import TextTokenizer
from gateway.text.tool_calls import joined_calls
from gateway.text_generation import TextChunk
from tests.gateway.chats import chat, tools
from tests.gateway.peers import LIMIT_S
from tests.gateway.served import Served

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture
def tiny_tokenizer(tiny_tokenizer: TextTokenizer) -> TextTokenizer:
    """With a template that knows of tools and says next to nothing of them."""
    template = "{{ messages[0].content }}{% if tools %}<tool_call>{'arguments'}{% endif %}".replace("'", '"')
    return TextTokenizer(replace(tiny_tokenizer._files, chat_template=template))


def asked(**fields: Any) -> Ask:
    prompt = Prompt("messages", chat=chat(("user", "weather?"), tools=tools(**fields)))
    return Ask("m", (prompt,), 200, SamplingParams(1, temperature=0.0), text=TextOptions(tells_calls=True))


async def answered(served: Served, ask: Ask, text: str, reason: str = "") -> tuple[Answer, list[TextChunk]]:
    """What the workers generate is `text`, a token a character, and a stop token if that is the reason to end."""
    text += "!" if reason == "stop" else ""
    answer = await served.serving.prepare(ask)

    async def gather() -> list[TextChunk]:
        async with asyncio.timeout(LIMIT_S):
            return [chunk async for chunk in answer.chunks()]

    chunks = asyncio.create_task(gather())
    decode = await served.to_decode(text[0])
    served.emit(decode, text[1:], reason)
    return answer, await chunks


@pytest.mark.parametrize(
    ("text", "reason", "told"),
    [
        (f"Let me see.\n{CALL}", "stop", ("Let me see.", 1, "tool_calls")),
        (f"{CALL}\n{CALL}", "stop", ("", 2, "tool_calls")),
        (f"{CALL}\n{CALL[:40]}", "length", (CALL[:40], 1, "length")),
        ("Nothing to call. ", "stop", ("Nothing to call. ", 0, "stop")),
        ("<tool_call>nonsense</tool_call>", "stop", ("<tool_call>nonsense</tool_call>", 0, "stop")),
    ],
)
async def test_calls_are_told_apart_from_content_and_decide_the_finish_reason(served, text, reason, told):
    answer, chunks = await answered(served, asked(), text, reason)
    calls = joined_calls(call for chunk in chunks for call in chunk.calls)
    assert ("".join(chunk.text for chunk in chunks), len(calls), chunks[-1].finish_reason) == told
    assert [bool(chunk.finish_reason) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert answer.usage.num_completion_tokens == len(text) + (reason == "stop")
    assert sum(len(chunk.tokens) for chunk in chunks) == answer.usage.num_completion_tokens
    assert served.outcomes() == {told[2]: 1}


async def test_where_one_call_is_allowed_its_end_ends_the_answer(served):
    text = f"{CALL}\n{CALL}"
    answer, chunks = await answered(served, asked(allows_several=False), text)
    assert chunks[-1].finish_reason == "tool_calls"
    assert answer.usage.num_completion_tokens == CALL.index("}}") + 2
    await served.rig.decode[0].take("abort")


async def test_chunks_are_openais_to_the_letter(served):
    ask = asked()
    answer, chunks = await answered(served, ask, f"Hm.\n{CALL}", "stop")
    shape = ChatShape(served.serving.tokenizer, ask)
    envelope = Envelope(shape, answer, "m")
    parts = [shape.opening(0), *(part for chunk in chunks for part in shape.parts(chunk))]
    for part in parts:
        ChatCompletionChunk.model_validate(envelope.chunk(part, {}), strict=True)
    first, *rest = [part["delta"] for part in parts if part is not None]
    assert first == {"role": "assistant", "content": None}
    deltas = [delta["tool_calls"][0] for delta in rest if "tool_calls" in delta]
    begun, *pieces = deltas
    assert begun.pop("id").startswith("call_")
    assert begun == {"index": 0, "type": "function", "function": {"name": "get_weather", "arguments": ""}}
    assert all(
        set(piece) == {"index", "function"} and set(piece["function"]) == {"arguments"} for piece in pieces
    )
    assert "".join(piece["function"]["arguments"] for piece in pieces) == '{"city": "Rome"}'
    assert len(pieces) > 3, "as they come"
    reasons = [part["finish_reason"] for part in parts if part is not None]
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]
    whole = json.loads(await envelope.whole([chunks]))
    ChatCompletion.model_validate(whole, strict=True)
    message = whole["choices"][0]["message"]
    assert message["content"] == "Hm."
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"city": "Rome"}']


async def test_a_whole_answer_of_calls_has_no_content(served):
    ask = asked()
    answer, chunks = await answered(served, ask, CALL, "stop")
    envelope = Envelope(ChatShape(served.serving.tokenizer, ask), answer, "m")
    (choice,) = json.loads(await envelope.whole([chunks]))["choices"]
    assert choice["message"]["content"] is None


async def test_a_chat_without_tools_is_not_read_for_calls(served):
    ask = Ask("m", (Prompt("messages", chat=chat(("user", "?"))),), 200, SamplingParams(1, temperature=0.0))
    _, chunks = await answered(served, ask, CALL, "stop")
    assert "".join(chunk.text for chunk in chunks) == CALL
    assert chunks[-1].finish_reason == "stop"
