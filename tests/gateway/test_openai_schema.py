"""Bodies as clients send them: every field's type and range, and bytes that are meant to hurt."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import InvalidRequest
from gateway.openai_schema import MAX_TOKENS, ChatBody, CompletionBody, TokenizeBody, parse_body
from gateway.serving import MAX_STOP_LEN, MAX_STOP_STRINGS

COMPLETION = {"model": "m", "prompt": "hi"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def body(**fields: Any) -> CompletionBody:
    return parse_body(json.dumps({**COMPLETION, **fields}).encode(), CompletionBody)


def refused(kind: type, **fields: Any) -> str:
    """The field at fault."""
    base = CHAT if kind is ChatBody else COMPLETION
    with pytest.raises(InvalidRequest) as caught:
        parse_body(json.dumps({**base, **fields}).encode(), kind).ask("")
    return caught.value.field


ACCEPTED = [
    ("max_tokens", [None, 1, MAX_TOKENS]),
    ("temperature", [None, 0, 0.0, 1, 2, 0.7]),
    ("top_p", [None, 1, 0.001, 1.0]),
    ("top_k", [None, -1, 0, 1, MAX_TOKENS]),
    ("seed", [None, 0, -(2**63), 2**64 - 1]),
    ("stop", [None, "x", [], ["x"] * MAX_STOP_STRINGS, "é" * MAX_STOP_LEN]),
    ("stop_token_ids", [None, [], [0, 2**32 - 1]]),
    ("ignore_eos", [None, True, False]),
    ("stream", [None, True, False]),
    ("prompt", ["", "x", [1, 2], ["x"], [[1, 2]], []]),
    ("n", [None, 1]),
    ("logit_bias", [None, {}]),
    ("tools", [None, []]),
    ("echo", [None, False]),
    ("user", [None, "someone", 5]),
    ("an_unknown_field", [{"of": ["any", "kind"]}]),
]
REFUSED = [
    ("model", [None, 5, "m" * 513, ["m"]]),
    ("max_tokens", [0, -1, MAX_TOKENS + 1, 1.5, "5", True, 10**30]),
    ("temperature", [-0.1, 2.1, "1", True, [1], 10**400]),
    ("top_p", [0, -1, 1.0001, "1", 10**400]),
    ("top_k", [-2, 1.5, "4", MAX_TOKENS + 1]),
    ("seed", [2**64, -(2**63) - 1, 1.5, "7", 10**60]),
    ("stop", ["", [""], 5, ["x"] * (MAX_STOP_STRINGS + 1), "x" * (MAX_STOP_LEN + 1), [None]]),
    ("stop_token_ids", [[-1], [2**32], ["1"], [1.0], [0] * 129, 5]),
    ("ignore_eos", ["yes", 1]),
    ("stream", ["true", 1, {}]),
    ("stream_options", [{"include_usage": True}, "yes", {"include_usage": "yes"}]),
    ("prompt", [None, 5, {}, ["a", "b"], [[1], [2]], [-1], [2**32], ["a", 1], [1.5], [True], [None]]),
    ("n", [0, 2, "1"]),
    ("best_of", [2]),
    ("echo", [True]),
    ("logprobs", [True, 5]),
    ("top_logprobs", [1]),
    ("presence_penalty", [0.5]),
    ("frequency_penalty", [-2]),
    ("repetition_penalty", [1.1]),
    ("logit_bias", [{"5": 1}]),
    ("response_format", [{"type": "json_object"}]),
    ("tools", [[{"type": "function"}]]),
    ("guided_json", [{}]),
    ("min_tokens", [3]),
    ("suffix", ["!"]),
]


def spread(table: list[tuple[str, list[Any]]]) -> list[Any]:
    pairs = [(name, value) for name, values in table for value in values]
    return [pytest.param(name, value, id=f"{name}={str(value)[:20]}") for name, value in pairs]


@pytest.mark.parametrize(("name", "value"), spread(ACCEPTED))
def test_values_within_a_fields_range_are_taken(name, value):
    assert body(**{name: value}).ask("") is not None


@pytest.mark.parametrize(("name", "value"), spread(REFUSED))
def test_values_outside_of_it_are_refused_by_name(name, value):
    assert refused(CompletionBody, **{name: value}) == name


def test_every_field_reaches_the_core_as_the_client_meant_it():
    ask = body(
        max_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        seed=-1,
        stop="END",
        stop_token_ids=[3],
        ignore_eos=True,
        prompt=[[4, 5]],
    ).ask("mine")
    assert (ask.model, ask.max_tokens, ask.temperature, ask.top_p, ask.top_k) == ("m", 7, 0.0, 0.5, 0)
    assert (ask.seed, ask.stop, ask.stop_token_ids, ask.ignore_eos) == (-1, ("END",), (3,), True)
    assert (ask.prompt.field, ask.prompt.token_ids, ask.prompt.text) == ("prompt", (4, 5), None)
    assert ask.client_request_id == "mine"


def test_what_is_left_out_has_openais_default():
    ask = body().ask("")
    assert (ask.max_tokens, ask.temperature, ask.top_p, ask.top_k, ask.seed) == (None, 1.0, 1.0, 0, None)
    assert (ask.stop, ask.stop_token_ids, ask.ignore_eos) == ((), (), False)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "hi",
        [{"role": "user"}],
        [{"content": "hi"}],
        [{"role": "admin", "content": "hi"}],
        [{"role": "tool", "content": "hi"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [5],
    ],
)
def test_messages_that_are_none_are_refused(messages):
    assert refused(ChatBody, messages=messages) == "messages"


def test_parts_are_joined_and_the_newer_names_mean_the_older_ones():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
    raw = json.dumps(
        {"model": "m", "messages": messages, "max_tokens": 4, "max_completion_tokens": 9}
    ).encode()
    ask = parse_body(raw, ChatBody).ask("")
    assert ask.prompt.messages == (
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "ab"},
    )
    assert ask.max_tokens == 9


def test_tokenize_takes_either_of_two():
    assert parse_body(b'{"prompt": "x"}', TokenizeBody).to_prompt().text == "x"
    with pytest.raises(InvalidRequest, match="either"):
        parse_body(b"{}", TokenizeBody).to_prompt()


HOSTILE = {
    "nothing": b"",
    "null": b"null",
    "a list": b"[]",
    "a string": b'"x"',
    "cut": b'{"model": "m", "prompt": "h',
    "two": b"{}{}",
    "a deep list": b'{"prompt": ' + b"[" * 100_000,
    "a deep whole": b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "a deep object": b'{"a":' * 100_000,
    "NaN": b'{"model": "m", "prompt": "x", "temperature": NaN}',
    "infinity": b'{"model": "m", "prompt": "x", "top_p": Infinity}',
    "a number too large": b'{"model": "m", "prompt": "x", "temperature": 1e999}',
    "a million digits": b'{"model": "m", "prompt": "x", "seed": ' + b"9" * 1_000_000 + b"}",
    "no UTF-8": b'{"model": "m", "prompt": "\xff\xfe"}',
    "half a surrogate": b'{"model": "m", "prompt": "\\ud800"}',
    "NUL bytes": b"\x00" * 100,
    "UTF-16": '{"model": "m", "prompt": "x"}'.encode("utf-16"),
    "a trailing comma": b'{"model": "m", "prompt": "x",}',
    "single quotes": b"{'model': 'm', 'prompt': 'x'}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_bytes_that_are_no_body_are_a_clients_mistake(name):
    with pytest.raises(InvalidRequest):
        parse_body(HOSTILE[name], CompletionBody)


def test_the_last_of_repeated_keys_counts_and_is_checked():
    raw = b'{"model": "a", "model": "m", "prompt": 5, "prompt": "x", "n": 3, "n": 1}'
    assert parse_body(raw, CompletionBody).ask("").model == "m"
    with pytest.raises(InvalidRequest):
        parse_body(b'{"model": "m", "prompt": "x", "n": 1, "n": 2}', CompletionBody)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from([name for name, _ in REFUSED] + ["messages", "max_completion_tokens"])


@given(fields=st.dictionaries(FIELDS, JSON, max_size=4), kind=st.sampled_from([CompletionBody, ChatBody]))
def test_any_json_in_any_field_is_taken_or_refused_by_name(fields, kind):
    base = CHAT if kind is ChatBody else COMPLETION
    at_fault = "none"
    try:
        parse_body(json.dumps({**base, **fields}).encode(), kind).ask("")
    except InvalidRequest as error:
        at_fault = error.field
    assert at_fault in (*fields, "none", "body")


@given(st.binary(max_size=60))
def test_any_bytes_are_taken_or_refused(raw):
    with pytest.raises(InvalidRequest):
        parse_body(raw, CompletionBody)
