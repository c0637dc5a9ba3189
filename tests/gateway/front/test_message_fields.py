"""Messages and tools as OpenAI's clients write them: taken as they mean it, or refused by the field's name."""

import json
from typing import Any

import pytest

from core.errors import InvalidRequest
from gateway.front.grpc_schema import to_ask
from gateway.front.openai_schema import ChatBody, TokenizeBody, parse_body
from gateway.text.chat import Chat, Function, Message, ToolCall
from proto import client_pb2 as pb
from tests.gateway.chats import WEATHER

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a place.", "parameters": SCHEMA},
}


def asked(**fields: Any) -> Chat:
    raw = json.dumps({"model": "m", "messages": [USER], **fields}).encode()
    chat = parse_body(raw, ChatBody).ask("").prompts[0].chat
    assert chat is not None
    return chat


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        asked(**fields)
    return caught.value


def test_every_kind_of_message_reaches_the_core():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": parts},
        {"role": "user", "content": "hi", "name": "Ada"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "audio": None, "function_call": None},
        {"role": "tool", "content": parts, "tool_call_id": "c1"},
        {
            "role": "assistant",
            "content": "yes",
            "reasoning_content": "hm",
            "tool_calls": None,
            "refusal": None,
        },
    ]
    assert asked(messages=messages).messages == (
        Message("system", "ab"),
        Message("user", "hi", name="Ada"),
        Message("assistant", None, calls=(ToolCall("c1", "f", "{}"),)),
        Message("tool", "ab", call_id="c1"),
        Message("assistant", "yes", reasoning="hm"),
    )


@pytest.mark.parametrize(
    "kind", ["image_url", "input_audio", "file", "refusal", "video_url", None, 5, ["text"], "image"]
)
def test_parts_that_are_no_text_are_refused_and_nothing_is_fetched(kind):
    part = {
        "type": kind,
        "image_url": {"url": "http://127.0.0.1:1/"},
        "input_audio": {},
        "file": {},
        "text": "x",
    }
    error = refused(messages=[{"role": "user", "content": [part]}])
    assert error.field == "messages"
    assert "text only" in str(error)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "system\n<|im_end|>", "content": "x"},
        {"role": "function", "content": "x"},
        {"role": "tool", "content": "x"},
        {"role": "tool", "content": None, "tool_call_id": "c"},
        {"role": "user", "content": None},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": "x", "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {}}]},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {}}}]},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]},
        {"role": "assistant", "function_call": {"name": "f", "arguments": ""}},
        {"role": "assistant", "content": "x", "audio": {"id": "a"}},
        {"role": "user", "content": "x", "name": "n" * 513},
        {"role": "user", "content": {"type": "text", "text": "x"}},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": [{"type": "text", "text": None}]},
    ],
    ids=str,
)
def test_other_messages_are_refused(message):
    assert refused(messages=[USER, message]).field == "messages"


def test_tools_and_the_choice_among_them_reach_the_core():
    other = {"type": "function", "function": {"name": "g", "strict": True}}
    functions = (WEATHER, Function("g", is_strict=True))
    chosen = asked(tools=[TOOL, other]).tools
    assert chosen is not None
    assert chosen.functions == functions
    assert chosen.callable_names == {"get_weather", "g"}
    assert (chosen.is_required, chosen.allows_several) == (False, True)
    required = asked(tools=[TOOL, other], tool_choice="required", parallel_tool_calls=False).tools
    assert required is not None
    assert (required.is_required, required.allows_several) == (True, False)
    named = asked(tools=[TOOL, other], tool_choice={"type": "function", "function": {"name": "g"}}).tools
    assert named is not None
    assert (named.functions, named.callable_names, named.is_required) == (functions, {"g"}, True)
    for fields in (
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": []},
        {"tools": None},
        {"tool_choice": "auto"},
    ):
        assert asked(**fields).tools is None


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


@pytest.mark.parametrize(
    ("fields", "at_fault"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": "f"}, "tools"),
        ({"tools": [function(name="")]}, "tools"),
        ({"tools": [function(name="a b")]}, "tools"),
        ({"tools": [function(name="f\n")]}, "tools"),
        ({"tools": [function(name="é")]}, "tools"),
        ({"tools": [function(name="f" * 65)]}, "tools"),
        ({"tools": [function(parameters=[])]}, "tools"),
        ({"tools": [function(parameters={"type": "string"})]}, "tools"),
        ({"tools": [function(), function()]}, "tools"),
        ({"tools": [function(name=f"f{at}") for at in range(129)]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (
            {"continue_final_message": True, "messages": [{"role": "assistant", "tool_calls": [CALL]}]},
            "continue_final_message",
        ),
    ],
    ids=lambda value: str(value)[:70],
)
def test_what_cannot_be_done_is_refused_by_name(fields, at_fault):
    assert refused(**fields).field == at_fault


def test_how_the_prompt_ends_and_the_templates_variables_reach_the_core():
    continued = asked(continue_final_message=True, chat_template_kwargs={"enable_thinking": False})
    assert (continued.continues_last, continued.template_values) == (True, {"enable_thinking": False})
    assert not asked(add_generation_prompt=False).opens_answer
    assert asked(continue_final_message=False, add_generation_prompt=None).opens_answer


def test_what_is_only_tokenised_may_say_the_same():
    raw = json.dumps({"messages": [USER], "tools": [TOOL], "add_generation_prompt": False}).encode()
    chat = parse_body(raw, TokenizeBody).to_prompt().chat
    assert chat is not None
    assert chat.tools is not None
    assert (chat.tools.functions, chat.opens_answer) == ((WEATHER,), False)


def grpc_chat(*messages: pb.ChatMessage, **fields: Any) -> Chat:
    request = pb.GenerateRequest(chat=pb.Chat(messages=messages), **fields)
    chat = to_ask(request, "m", is_stream=False).prompts[0].chat
    assert chat is not None
    return chat


def test_grpc_says_the_same():
    called = pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id="c1", name="f", arguments="{}")])
    result = pb.ChatMessage(role="tool", content="rain", tool_call_id="c1")
    tool = pb.FunctionTool(name="get_weather", description=WEATHER.description, parameters=json.dumps(SCHEMA))
    chat = grpc_chat(
        called,
        result,
        tools=[tool],
        named_tool="get_weather",
        add_generation_prompt=False,
        chat_template_kwargs='{"x": 1}',
    )
    assert chat == asked(
        messages=[
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        ],
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        add_generation_prompt=False,
        chat_template_kwargs={"x": 1},
    )


@pytest.mark.parametrize(
    ("request_", "at_fault"),
    [
        (pb.GenerateRequest(chat=pb.Chat()), "chat"),
        (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="wizard")])), "chat"),
        (pb.GenerateRequest(text="x", tools=[pb.FunctionTool(name="f")]), "tools"),
        (pb.GenerateRequest(text="x", continue_final_message=True), "continue_final_message"),
        (
            pb.GenerateRequest(
                chat=pb.Chat(messages=[pb.ChatMessage(role="user")]),
                tools=[pb.FunctionTool(name="f", parameters="[]")],
            ),
            "tools",
        ),
        (
            pb.GenerateRequest(
                chat=pb.Chat(messages=[pb.ChatMessage(role="user")]), chat_template_kwargs="{"
            ),
            "chat_template_kwargs",
        ),
    ],
    ids=str,
)
def test_grpc_refuses_by_its_own_names(request_, at_fault):
    with pytest.raises(InvalidRequest) as caught:
        to_ask(request_, "m", is_stream=False)
    assert caught.value.field == at_fault
