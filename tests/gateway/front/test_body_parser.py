"""Small bodies are parsed in place, large ones in another process, and both end alike."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from core.errors import Busy, EngineFailed, InvalidRequest
from gateway.front.body_parser import MAX_INLINE_BYTES, MAX_WAITING, BodyParser
from gateway.front.readers import READERS
from proto import client_pb2 as pb

PADDING = "x" * MAX_INLINE_BYTES
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"at": {"maximum": 2**60}}}}
CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": WEATHER}],
    "tool_choice": "required",
    "chat_template_kwargs": {"deep": [1, None, {"a": 2.5}]},
}
SAMPLING = {
    "temperature": 0,
    "logit_bias": {"5": 2, "7": -1e9},
    "stop": ["a", "b"],
    "seed": 2**64 - 1,
    "allowed_token_ids": [3, 4],
    "bad_words": ["no"],
    "n": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
}
RESPONSE = {"model": "m", "input": "hi", "metadata": {"a": "b"}, "instructions": "be brief"}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
GENERATE = pb.GenerateRequest(text="x" * (MAX_INLINE_BYTES + 1), n=2, logit_bias={4: 1.5}, resumable=True)
MINE = {"client_request_id": "mine"}
BODIES: dict[str, tuple[str, bytes | dict[str, Any], dict[str, str | bool]]] = {
    "a completion": ("completion", {"model": "m", "prompt": [[1, 2], [3]], **SAMPLING}, MINE),
    "a chat with tools": ("chat", {**CHAT, **SAMPLING}, MINE),
    "a chat with a form": (
        "chat",
        {"model": "m", "messages": CHAT["messages"], "response_format": FORM},
        MINE,
    ),
    "a response": ("response", {**RESPONSE, "tools": [{"type": "function", **WEATHER}]}, MINE),
    "a text": ("tokenize", {"prompt": "a b"}, {}),
    "tokens": ("detokenize", {"model": "m", "tokens": [1, 2**32 - 1]}, {}),
    "over gRPC": ("generate", GENERATE.SerializeToString(), {"model_id": "m", "is_stream": True}),
}


def large(body: bytes | dict[str, Any]) -> bytes:
    return body if isinstance(body, bytes) else json.dumps({**body, "ignored": PADDING}).encode()


LARGE = large({"prompt": "x"})


@pytest_asyncio.fixture
async def parser() -> AsyncIterator[BodyParser]:
    made = BodyParser()
    yield made
    await made.close()


async def test_what_another_process_reads_is_what_is_read_here(parser):
    assert {reader for reader, _, _ in BODIES.values()} == READERS.keys()
    for name, (reader, body, options) in BODIES.items():
        raw = large(body)
        assert await parser.parse(reader, raw, **options) == READERS[reader].read(raw, **options), name
    assert parser.child is not None


async def test_a_small_body_needs_no_other_process(parser):
    assert (await parser.parse("tokenize", b'{"prompt": "x"}')).prompt.text == "x"
    assert parser.child is None


@pytest.mark.parametrize("padding", ["", PADDING])
@pytest.mark.parametrize(
    ("fields", "field"),
    [({"prompt": 5}, "prompt"), ({"prompt": "x", "n": 0}, "n"), ({"prompt": [2**64]}, "prompt")],
)
async def test_a_refusal_names_its_field_wherever_it_was_parsed(parser, padding, fields, field):
    raw = json.dumps({"model": "m", **fields, "ignored": padding}).encode()
    with pytest.raises(InvalidRequest) as caught:
        await parser.parse("completion", raw, client_request_id="")
    assert caught.value.field == field


@pytest.mark.parametrize("padding", ["", PADDING])
async def test_a_number_that_no_process_could_send_is_refused_by_both(parser, padding):
    raw = json.dumps({**CHAT, "chat_template_kwargs": {"a": 2**64}, "ignored": padding}).encode()
    with pytest.raises(InvalidRequest, match="64 bits") as caught:
        await parser.parse("chat", raw, client_request_id="")
    assert caught.value.field == "chat_template_kwargs"


async def test_a_process_that_dies_costs_its_body_an_error_and_the_next_gets_another(parser):
    await parser.parse("tokenize", LARGE)
    first = parser.child.pid
    os.kill(first, signal.SIGSTOP)
    waiting = asyncio.create_task(parser.parse("tokenize", LARGE))
    await asyncio.sleep(0.05)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(EngineFailed):
        await waiting
    assert (await parser.parse("tokenize", LARGE)).prompt.text == "x"
    assert parser.child.pid != first


async def test_who_leaves_takes_nobodys_answer(parser):
    await parser.parse("tokenize", LARGE)
    os.kill(parser.child.pid, signal.SIGSTOP)
    leaving = asyncio.create_task(parser.parse("detokenize", large({"tokens": [1]})))
    staying = asyncio.create_task(parser.parse("tokenize", large({"prompt": "mine"})))
    await asyncio.sleep(0.05)
    leaving.cancel()
    os.kill(parser.child.pid, signal.SIGCONT)
    assert (await staying).prompt.text == "mine"


async def test_too_many_that_wait_are_busy_and_small_ones_pass(parser):
    await parser.parse("tokenize", LARGE)
    os.kill(parser.child.pid, signal.SIGSTOP)
    waiting = [asyncio.create_task(parser.parse("tokenize", LARGE)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0.05)
    with pytest.raises(Busy):
        await parser.parse("tokenize", LARGE)
    assert (await parser.parse("tokenize", b'{"prompt": "x"}')).prompt.text == "x"
    os.kill(parser.child.pid, signal.SIGCONT)
    assert {read.prompt.text for read in await asyncio.gather(*waiting)} == {"x"}
