"""/v1/responses with OpenAI's own clients over a real cluster: text, streams, calls, structured answers."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pytest
import pytest_asyncio
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.end_to_end.openai_cluster import MODEL, WEATHER, OpenAICluster, openai_cluster

pytestmark = pytest.mark.asyncio(loop_scope="module")
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
TOOL = {"type": "function", "strict": True, **WEATHER["function"]}
CALLING = {
    "model": MODEL,
    "input": "weather?",
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}


class Reading(BaseModel):
    city: Literal["Rome", "Oslo"]
    is_wet: bool


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(start_cluster) -> AsyncIterator[OpenAICluster]:
    async with openai_cluster(start_cluster) as running:
        yield running


async def test_text_is_that_of_a_chat_whole_and_streamed_from_both_clients(served):
    options = {
        "model": MODEL,
        "input": "hello",
        "instructions": "Be brief.",
        "max_output_tokens": 12,
        "temperature": 0,
    }
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    chat = await served.client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=12, temperature=0
    )
    whole = await served.client.responses.create(**options)
    assert whole.output_text == chat.choices[0].message.content
    assert whole.usage.total_tokens == chat.usage.total_tokens
    assert whole.status == ("incomplete" if chat.choices[0].finish_reason == "length" else "completed")
    assert (
        await asyncio.to_thread(lambda: served.blocking.responses.create(**options))
    ).output_text == whole.output_text
    stream = await served.client.responses.create(**options, stream=True)
    events = [event async for event in stream]
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta")
        == whole.output_text
    )
    assert events[-1].type == f"response.{whole.status}"
    assert events[-1].response.output_text == whole.output_text


async def test_bodies_and_events_follow_openais_types_to_the_letter(served):
    body = {**CALLING, "seed": 2}
    answer = await served.http.post("/v1/responses", json=body, headers={"x-tandem-timing": "1"})
    Response.model_validate(answer.json(), strict=True)
    assert answer.json()["timing"]["total_s"] > 0
    events = [json.loads(event) for event in await served.events("/v1/responses", body)]
    for event in events:
        EVENT.validate_python(event, strict=True)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1


async def test_calls_and_their_results(served):
    whole = await served.client.responses.create(**CALLING, extra_body={"seed": 2})
    (call,) = whole.output
    assert (call.type, call.name, call.status, whole.output_text) == (
        "function_call",
        "get_weather",
        "completed",
        "",
    )
    assert set(json.loads(call.arguments)) == {"city", "days"}
    async with served.client.responses.stream(**CALLING, extra_body={"seed": 2}) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert final.output[0].arguments == call.arguments
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    items: list[Any] = [
        {"role": "user", "content": "weather?"},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    answer = await served.client.responses.create(model=MODEL, input=items, tools=[TOOL], max_output_tokens=4)
    assert answer.usage.input_tokens > whole.usage.input_tokens


async def test_a_pydantic_model_is_filled_whole_and_streamed(served):
    parsed = await served.client.responses.parse(
        model=MODEL, input="weather?", text_format=Reading, extra_body={"seed": 4}
    )
    assert isinstance(parsed.output_parsed, Reading)
    async with served.client.responses.stream(
        model=MODEL, input="weather?", text_format=Reading, extra_body={"seed": 4}
    ) as stream:
        final = await stream.get_final_response()
    assert final.output_parsed == parsed.output_parsed


async def test_nothing_is_stored_and_who_needs_that_is_told(served):
    stored = await served.client.responses.create(model=MODEL, input="hi", store=True, max_output_tokens=1)
    assert stored.model_extra["store"] is False if stored.model_extra else stored.store is False
    with pytest.raises(openai.BadRequestError) as refused:
        await served.client.responses.create(model=MODEL, input="hi", previous_response_id=stored.id)
    assert refused.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        await served.client.responses.retrieve(stored.id)
    assert await served.mistake("/v1/responses", input="hi", background=True) == (400, "background")
    with pytest.raises(openai.NotFoundError):
        await served.client.responses.create(model="other", input="hi")
