"""/v1/responses: bodies and what they mean; objects and events as OpenAI's own types have them, in their order."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from core.errors import Busy, InvalidRequest, TandemError, WorkerLost
from gateway.front.openai_schema import parse_body
from gateway.front.responses_objects import ResponseWriter
from gateway.front.responses_schema import UNSUPPORTED, ResponsesBody
from gateway.text.chat import Function, Message, ToolCall, Tools
from gateway.text.tokenizer import TextTokenizer
from gateway.text_generation import TextChunk
from tests.gateway.chats import WEATHER
from tests.gateway.peers import LIMIT_S
from tests.gateway.served import Served

EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a place.",
    "parameters": dict(WEATHER.parameters or {}),
    "strict": False,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def body(**fields: Any) -> ResponsesBody:
    raw = json.dumps({"model": "m", "input": "hi", **fields}).encode()
    return parse_body(raw, ResponsesBody, UNSUPPORTED)


def messages(**fields: Any) -> tuple[Message, ...]:
    chat = body(**fields).ask("").prompts[0].chat
    assert chat is not None
    return chat.messages


def test_input_is_text_or_items_and_a_turn_is_one_message():
    assert messages(input="hi", instructions="Be brief.") == (
        Message("system", "Be brief."),
        Message("user", "hi"),
    )
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {
            "type": "message",
            "role": "assistant",
            "id": "m",
            "content": [{"type": "output_text", "text": "Well."}],
        },
        {
            "type": "function_call",
            "id": "f",
            "call_id": "c1",
            "name": "f",
            "arguments": "{}",
            "status": "completed",
        },
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
        {"type": "function_call", "call_id": "c3", "name": "g", "arguments": "{}"},
    ]
    assert messages(input=items) == (
        Message("system", "Be brief."),
        Message("user", "weather?"),
        Message("assistant", "Well.", calls=(ToolCall("c1", "f", "{}"), ToolCall("c2", "g", "{}"))),
        Message("tool", "rain", call_id="c1"),
        Message("tool", "sun", call_id="c2"),
        Message("assistant", None, calls=(ToolCall("c3", "g", "{}"),)),
    )


def test_the_rest_reaches_the_core_too():
    schema = {"type": "object"}
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    ask = body(
        max_output_tokens=7, temperature=0.5, top_p=0.9, text=form, tools=[TOOL], parallel_tool_calls=False
    ).ask("mine")
    chat = ask.prompts[0].chat
    assert chat is not None
    assert chat.tools == Tools((WEATHER,), frozenset({"get_weather"}), False, False)
    assert (ask.max_tokens, ask.sampling.temperature, ask.sampling.top_p) == (7, 0.5, 0.9)
    assert (ask.client_request_id, ask.text.tells_calls) == ("mine", True)
    assert ask.form is not None
    assert (ask.form.field, json.loads(ask.form.text)) == ("text", schema)
    named = (
        body(tools=[TOOL], tool_choice={"type": "function", "name": "get_weather"}).ask("").prompts[0].chat
    )
    assert named is not None
    assert named.tools == Tools((WEATHER,), frozenset({"get_weather"}), True, False)


@pytest.mark.parametrize(
    ("fields", "at_fault"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/"}]}]},
            "input",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"type": ["message"]}]}, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"chat_template": "x"}, "chat_template"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text"),
        (
            {"text": {"format": {"type": "json_object"}}, "response_format": {"type": "json_object"}},
            "response_format",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"metadata": {"a": 5}}, "metadata"),
        ({"n": 2}, "n"),
        ({"model": None}, "model"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_done_is_refused_by_name(fields, at_fault):
    with pytest.raises(InvalidRequest) as caught:
        body(**fields).ask("")
    assert caught.value.field == at_fault


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True},
        {"reasoning": {"effort": "high"}, "include": ["reasoning.encrypted_content"]},
        {"previous_response_id": None, "background": False, "truncation": "disabled", "metadata": {"a": "b"}},
        {"service_tier": "auto", "user": "someone", "text": {"verbosity": "low"}, "max_tool_calls": 3},
        {"text": {"format": {"type": "text"}}, "tools": [], "tool_choice": "auto"},
    ],
)
def test_what_changes_nothing_is_taken(fields):
    assert body(**fields).ask("").form is None


@pytest.fixture
def tiny_tokenizer(tiny_tokenizer: TextTokenizer) -> TextTokenizer:
    template = "{{ messages[0].content }}{% if tools %}<tool_call>{'arguments'}{% endif %}".replace("'", '"')
    return TextTokenizer(replace(tiny_tokenizer._files, chat_template=template))


async def written(
    served: Served, text: str, reason: str, **fields: Any
) -> tuple[ResponseWriter, ResponseWriter, list[TextChunk]]:
    """Two writers of the same answer, and its chunks."""
    asked = body(tools=[TOOL], **fields)
    answer = await served.serving.prepare(asked.ask(""))

    async def gather() -> list[TextChunk]:
        async with asyncio.timeout(LIMIT_S):
            return [chunk async for chunk in answer.chunks()]

    chunks = asyncio.create_task(gather())
    text += "!" if reason == "stop" else ""
    decode = await served.to_decode(text[0])
    served.emit(decode, text[1:], reason)
    return ResponseWriter(answer, asked.echo(), "m"), ResponseWriter(answer, asked.echo(), "m"), await chunks


def streamed(writer: ResponseWriter, chunks: list[TextChunk]) -> list[dict[str, Any]]:
    """Events as they go out: copied when they are made."""
    events = [json.dumps(event) for event in writer.opening()]
    events += [json.dumps(event) for chunk in chunks for event in writer.events(chunk)]
    return [json.loads(event) for event in [*events, *map(json.dumps, writer.closing())]]


MESSAGE = [
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
]
FUNCTION = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
DONE = "output_item.done"


@pytest.mark.parametrize(
    ("text", "reason", "kinds", "status"),
    [
        ("Hi there.", "stop", [*MESSAGE, DONE], "completed"),
        ("Hi there", "length", [*MESSAGE, DONE], "incomplete"),
        (CALL, "stop", [*FUNCTION, DONE], "completed"),
        (
            f"Hm. {CALL}\n{CALL}\nSo.",
            "stop",
            [*MESSAGE, DONE, *[*FUNCTION, DONE] * 2, *MESSAGE, DONE],
            "completed",
        ),
        (CALL[:-16], "length", [*FUNCTION, DONE], "incomplete"),
    ],
    ids=["text", "cut", "call", "both", "cut call"],
)
async def test_events_are_openais_in_their_order_and_add_up_to_the_whole_response(
    served, text, reason, kinds, status
):
    writer, other, chunks = await written(served, text, reason)
    events = streamed(writer, chunks)
    for event in events:
        EVENT.validate_python(event, strict=True)
    told = [event["type"].removeprefix("response.") for event in events]
    in_order = [kind for at, kind in enumerate(told) if not (kind.endswith("delta") and told[at - 1] == kind)]
    assert in_order == ["created", "in_progress", *kinds, status]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert all(
        event["item"]["status"] == "in_progress" for event in events if event["type"].endswith("item.added")
    )
    last = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert last["output"] == done
    whole = other.whole(chunks)
    Response.model_validate(whole, strict=True)
    assert without_ids(whole) == without_ids(last)
    for at, item in enumerate(done):
        deltas = [
            event["delta"]
            for event in events
            if event["type"].endswith("delta") and event["output_index"] == at
        ]
        assert "".join(deltas) == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
    calls = [item["arguments"] for item in done if item["type"] == "function_call"]
    assert calls in ([], ['{"city": "Rome"}'], ['{"city": "Rome"}'] * 2, ['{"city": "Rome'])


async def test_an_answer_of_nothing_is_an_empty_message(served):
    writer, _, _ = await written(served, "Hi.", "stop")
    events = streamed(writer, [TextChunk("", (), "stop")])
    nothing = [kind for kind in MESSAGE if "delta" not in kind]
    assert [event["type"].removeprefix("response.") for event in events[2:-1]] == [*nothing, DONE]
    assert Response.model_validate(events[-1]["response"], strict=True).output_text == ""


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    return {
        **response,
        "output": [{k: v for k, v in item.items() if k != "id"} for item in response["output"]],
    }


async def test_a_response_says_what_was_asked_and_that_nothing_is_stored(served):
    fields = {
        "instructions": "Be brief.",
        "temperature": 0.5,
        "metadata": {"a": "b"},
        "store": True,
        "top_k": 3,
    }
    _, writer, chunks = await written(served, "Hi.", "stop", **fields)
    response = Response.model_validate(writer.whole(chunks), strict=True)
    assert response.output_text == "Hi."
    assert (response.instructions, response.temperature, response.metadata) == ("Be brief.", 0.5, {"a": "b"})
    assert [tool.model_dump(exclude_unset=True) for tool in response.tools] == [TOOL]
    assert writer.response("completed")["store"] is False
    assert response.usage is not None
    assert (response.usage.output_tokens, response.usage.input_tokens) == (4, response.usage.total_tokens - 4)


@pytest.mark.parametrize(
    ("error", "code"), [(WorkerLost("gone"), "server_error"), (Busy("full"), "rate_limit_exceeded")]
)
async def test_a_failure_after_the_headers_ends_the_response_as_failed(served, error: TandemError, code):
    writer, _, chunks = await written(served, "Hi.", "stop")
    events = [*writer.opening(), *writer.events(chunks[0]), *writer.failing(error)]
    for event in events:
        EVENT.validate_python(event, strict=True)
    last = events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == code
    assert [item["status"] for item in last["response"]["output"]] == ["incomplete"]


def test_functions_of_a_response_are_those_of_a_chat():
    chat = body(tools=[{"type": "function", "name": "f"}]).ask("").prompts[0].chat
    assert chat is not None
    assert chat.tools is not None
    assert chat.tools.functions == (Function("f"),)
