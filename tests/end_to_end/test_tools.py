"""Calls of functions with OpenAI's own clients and gRPC, over a real cluster: a random model that must call does."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import grpc
import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, Field

from proto import client_pb2 as pb
from proto import client_pb2_grpc
from proto import types_pb2 as types
from tests.end_to_end.openai_cluster import MODEL, PING, WEATHER, OpenAICluster, openai_cluster

pytestmark = pytest.mark.asyncio(loop_scope="module")
USER = {"role": "user", "content": "weather?"}
ONE = {"model": MODEL, "messages": [USER], "tools": [WEATHER, PING], "parallel_tool_calls": False, "seed": 3}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


class Reading(BaseModel):
    """What a tool of pydantic's takes."""

    city: Literal["Rome", "Oslo"]
    degrees: int = Field(ge=0, le=9)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(start_cluster) -> AsyncIterator[OpenAICluster]:
    async with openai_cluster(start_cluster) as running:
        yield running


def check_arguments(name: str, text: str) -> None:
    arguments = json.loads(text)
    if name == "ping":
        assert arguments == {}
    else:
        assert name == "get_weather"
        assert set(arguments) == {"city", "days"}
        assert arguments["city"] in ("Rome", "Zürich", "<|im_end|>")
        assert 1 <= arguments["days"] <= 9


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_what_must_call_calls_whole_and_streamed_alike(served, choice):
    whole = await served.client.chat.completions.create(**ONE, tool_choice=choice)
    ChatCompletion.model_validate(whole.model_dump(), strict=True)
    (only,) = whole.choices
    assert (only.message.content, only.finish_reason) == (None, "tool_calls")
    (call,) = only.message.tool_calls
    check_arguments(call.function.name, call.function.arguments)
    if choice is NAMED:
        assert call.function.name == "get_weather"
    chunks = await served.chunks(**ONE, tool_choice=choice)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": None}
    first, *rest = [part for own in choices for part in own["delta"].get("tool_calls", ())]
    assert first.pop("id").startswith("call_")
    assert first == {
        "index": 0,
        "type": "function",
        "function": {"name": call.function.name, "arguments": ""},
    }
    assert "".join(part["function"]["arguments"] for part in rest) == call.function.arguments
    assert all(set(part) == {"index", "function"} for part in rest)
    assert len(rest) > 1, "as they come"
    assert [own["finish_reason"] for own in choices] == [None] * (len(choices) - 1) + ["tool_calls"]


async def test_several_calls_and_several_choices_have_calls_of_their_own(served):
    answer = await served.client.chat.completions.create(
        **{**ONE, "parallel_tool_calls": True}, tool_choice="required", n=3, max_tokens=300
    )
    ids = []
    for choice in answer.choices:
        assert choice.finish_reason in ("tool_calls", "length")
        *calls, last = choice.message.tool_calls
        for call in calls if choice.finish_reason == "length" else [*calls, last]:
            check_arguments(call.function.name, call.function.arguments)
        ids += [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == len(ids) >= 3


async def test_openais_helpers_read_calls_whole_and_streamed(served):
    options = {
        "model": MODEL,
        "messages": [USER],
        "tools": [openai.pydantic_function_tool(Reading, name="read")],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "seed": 5,
    }
    parsed = await served.client.chat.completions.parse(**options)
    (call,) = parsed.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Reading)
    async with served.client.chat.completions.stream(**options) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    assert final.choices[0].message.content is None
    assert final.choices[0].message.tool_calls[0].function.parsed_arguments == call.function.parsed_arguments
    kinds = {event.type for event in events}
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert "content.delta" not in kinds

    def blocking() -> Any:
        return served.blocking.chat.completions.parse(**options).choices[0].message.tool_calls[0].function

    assert (await asyncio.to_thread(blocking)).parsed_arguments == call.function.parsed_arguments


async def test_a_calls_result_is_answered(served):
    called = (await served.client.chat.completions.create(**ONE, tool_choice="required")).choices[0].message
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "rain"}
    messages = [USER, called.model_dump(exclude_none=True), result]
    answer = await served.client.chat.completions.create(
        model=MODEL, messages=messages, tools=[WEATHER, PING], max_tokens=4, temperature=0
    )
    assert answer.choices[0].finish_reason in ("stop", "length")


async def test_a_free_answer_is_content_and_none_calls_nothing(served):
    for choice in ("auto", "none", None):
        options = {} if choice is None else {"tool_choice": choice}
        chunks = await served.chunks(**{**ONE, "max_tokens": 12, **options})
        assert not any("tool_calls" in chunk["choices"][0]["delta"] for chunk in chunks)
        assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
        count = (await served.http.post("/v1/tokenize", json={"messages": [USER]})).json()["count"]
        answer = await served.client.chat.completions.create(**ONE, max_tokens=1, **options)
        assert (answer.usage.prompt_tokens == count) == (choice == "none"), "the functions are shown, or not"


async def test_a_structured_answer_may_be_a_call_instead(served):
    schema = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}},
    }
    for seed in range(4):
        answer = await served.client.chat.completions.create(**{**ONE, "seed": seed}, response_format=form)
        (choice,) = answer.choices
        if choice.finish_reason == "tool_calls":
            called = choice.message.tool_calls[0].function
            check_arguments(called.name, called.arguments)
        else:
            assert set(json.loads(choice.message.content)) == {"x"}


WRONG = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "x"}}}}}
REFUSED = [
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({"tools": [PING], "tool_choice": NAMED}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [PING], "guided_regex": "a+"}, "guided_regex"),
    ({"tools": [WRONG], "tool_choice": "required"}, "tools"),
]


@pytest.mark.parametrize(("body", "field"), REFUSED, ids=lambda value: str(value)[:60])
async def test_what_cannot_be_called_is_refused_by_name(served, body, field):
    assert await served.mistake("/v1/chat/completions", messages=[USER], **body) == (400, field)


async def test_grpc_tells_calls_whole_and_streamed(served):
    tool = WEATHER["function"]
    request = pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="weather?")]),
        tools=[pb.FunctionTool(name="get_weather", parameters=json.dumps(tool["parameters"]))],
        named_tool="get_weather",
        seed=3,
    )
    async with grpc.aio.insecure_channel(served.cluster.grpc) as channel:
        stub = client_pb2_grpc.TandemStub(channel)
        (whole,) = (await stub.Generate(request)).choices
        parts = [chunk.choice async for chunk in stub.GenerateStream(request)]
    (call,) = whole.tool_calls
    assert (call.name, whole.text, whole.finish_reason) == ("get_weather", "", types.FINISH_REASON_TOOL_CALLS)
    check_arguments(call.name, call.arguments)
    calls = [own for part in parts for own in part.tool_calls]
    assert (calls[0].name, bool(calls[0].id)) == ("get_weather", True)
    assert "".join(own.arguments for own in calls) == call.arguments
    assert parts[-1].finish_reason == types.FINISH_REASON_TOOL_CALLS
