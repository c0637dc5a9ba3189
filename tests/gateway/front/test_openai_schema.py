"""Bodies as clients send them: every field's type and range, and bytes that are meant to hurt."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import InvalidRequest
from core.sampling import SamplingParams
from gateway.ask import MAX_CHOICES, MAX_STOP_LEN, MAX_STOP_STRINGS, TextOptions
from gateway.front.openai_schema import ChatBody, CompletionBody, TokenizeBody, parse_body
from gateway.front.sampling_fields import MAX_BIASED, MAX_TOKENS
from tests.gateway.chats import chat

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
    ("prompt", ["", "x", [1, 2], ["x"], [[1, 2]], [], ["a", "b"], [[1], [2, 3]], ["x"] * MAX_CHOICES]),
    ("n", [None, 1, MAX_CHOICES]),
    ("best_of", [None, 1, 5]),
    ("logprobs", [None, 0, 20]),
    ("prompt_logprobs", [None, 0, 20]),
    ("min_p", [None, 0, 0.5, 1]),
    ("min_tokens", [None, 0, 3]),
    ("presence_penalty", [None, -2, 0, 2]),
    ("frequency_penalty", [None, -2.0, 0.5]),
    ("repetition_penalty", [None, 0.1, 1, 2.5]),
    ("logit_bias", [None, {}, {"5": 1}, {"0": -1e9}, {"4294967295": 1.5}]),
    ("allowed_token_ids", [None, [3], [1, 1, 2]]),
    ("bad_words", [None, [], ["x", "two words"]]),
    ("include_stop_str_in_output", [None, True]),
    ("skip_special_tokens", [None, False]),
    ("priority", [None, -5, 0, 7]),
    ("echo", [None, False, True]),
    ("user", [None, "someone", 5]),
    ("an_unknown_field", [{"of": ["any", "kind"]}]),
]
REFUSED = [
    ("model", [None, 5, "m" * 513, ["m"]]),
    ("max_tokens", [0, -1, 2**63, MAX_TOKENS + 1, 1.5, "5", True, 10**30]),
    ("temperature", [-0.1, 2.1, "1", True, [1], 10**400]),
    ("top_p", [0, -1, 1.0001, "1", 10**400]),
    ("top_k", [-2, 1.5, "4", MAX_TOKENS + 1]),
    ("seed", [2**64, -(2**63) - 1, 1.5, "7", 10**60]),
    ("stop", ["", [""], 5, ["x"] * (MAX_STOP_STRINGS + 1), "x" * (MAX_STOP_LEN + 1), [None]]),
    ("stop_token_ids", [[-1], [2**32], ["1"], [1.0], [0] * 129, 5]),
    ("ignore_eos", ["yes", 1]),
    ("stream", ["true", 1, {}]),
    ("min_p", [-0.1, 1.1, "1", True]),
    ("min_tokens", [-1, 1.5, "3"]),
    ("stream_options", [{"include_usage": True}, "yes", {"include_usage": "yes"}]),
    ("prompt", [None, 5, {}, [-1], [[-1]], [2**32], ["a", 1], [1, "a"], [1.5], [True], [None]]),
    ("prompt", [["x"] * (MAX_CHOICES + 1), [["x"]], [[1], "a"], [{}], [[], [1.5]]]),
    ("n", [0, -1, MAX_CHOICES + 1, 10**6, "1", 1.5, True]),
    ("best_of", [0, 10**6, "2"]),
    ("echo", ["yes", 1]),
    ("logprobs", [True, 21, -1, 10**6, "5"]),
    ("prompt_logprobs", [True, 21, -1]),
    ("presence_penalty", [2.1, -2.1, "0"]),
    ("frequency_penalty", [2.1, -2.1, True]),
    ("repetition_penalty", [0, -1, 101, "1"]),
    ("logit_bias", [{"-1": 5}, {"AI": 1}, {"5": "x"}, {"5": True}, {"": 1}, {"5": None}, [1], 5, {"1.5": 1}]),
    ("logit_bias", [{str(token): 1 for token in range(MAX_BIASED + 1)}, {"9" * 5000: 1}, {"٣": 1}]),
    ("allowed_token_ids", [[], [-1], ["1"], 5]),
    ("bad_words", [[""], "x", ["x"] * 129, [5]]),
    ("priority", [2**31, 1.5, "0"]),
    ("response_format", [{}, {"type": "xml"}, {"type": "json_schema"}, "json_object", []]),
    ("structured_outputs", [{}, {"json": {}, "regex": "a"}, {"whitespace_pattern": " "}, "json"]),
    ("guided_json", ["{", 5, []]),
    ("guided_regex", ["", 5]),
    ("guided_choice", [[], "a", [1]]),
    ("guided_grammar", ["", {}]),
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
    sampling = ask.sampling
    assert (ask.model, ask.max_tokens, ask.seed, ask.ignores_eos) == ("m", 7, -1, True)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 0)
    assert (ask.text.stop, sampling.stop_token_ids) == (("END",), (3,))
    assert [(prompt.field, prompt.token_ids, prompt.text) for prompt in ask.prompts] == [
        ("prompt", (4, 5), None)
    ]
    assert ask.client_request_id == "mine"


def test_the_rest_of_sampling_reaches_the_core_too():
    ask = body(
        min_p=0.1,
        min_tokens=2,
        presence_penalty=0.5,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={"9": -1e9, "4": 2},
        allowed_token_ids=[7, 8],
        bad_words=["no"],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        n=2,
        best_of=3,
        logprobs=4,
        echo=True,
        priority=-2,
        prompt=["a", "b"],
    ).ask("")
    assert ask.sampling == SamplingParams(
        1,
        min_p=0.1,
        min_tokens=2,
        presence_penalty=0.5,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias=((4, 2), (9, -100)),
        allowed_token_ids=(7, 8),
        num_logprobs=4,
        num_prompt_logprobs=4,
        priority=-2,
    )
    assert (ask.n, ask.best_of, ask.num_choices, ask.echoes, ask.wants_logprobs) == (2, 3, 6, True, True)
    assert (ask.bad_words, ask.text) == (("no",), TextOptions((), True, False))


@pytest.mark.parametrize(
    ("kind", "fields", "at_fault"),
    [
        (CompletionBody, {"best_of": 1, "n": 2}, "best_of"),
        (CompletionBody, {"best_of": 2, "stream": True}, "best_of"),
        (CompletionBody, {"n": 65, "prompt": ["a", "b"]}, "n"),
        (CompletionBody, {"best_of": 65, "prompt": ["a", "b"]}, "best_of"),
        (CompletionBody, {"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        (ChatBody, {"top_logprobs": 3}, "top_logprobs"),
        (ChatBody, {"top_logprobs": 3, "logprobs": False}, "top_logprobs"),
        (ChatBody, {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        (ChatBody, {"logprobs": 1}, "logprobs"),
        (ChatBody, {"max_tokens": 0}, "max_tokens"),
        (ChatBody, {"echo": True}, "echo"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(kind, fields, at_fault):
    assert refused(kind, **fields) == at_fault


def test_a_prompt_may_be_scored_without_output():
    ask = body(max_tokens=0, echo=True, logprobs=1).ask("")
    assert (ask.max_tokens, ask.sampling.num_prompt_logprobs) == (0, 1)
    assert body(max_tokens=0, prompt_logprobs=0).ask("").sampling.num_prompt_logprobs == 0
    assert body(echo=True).ask("").sampling.num_prompt_logprobs == -1


def test_what_is_left_out_has_openais_default():
    ask = body().ask("")
    assert (ask.max_tokens, ask.seed, ask.ignores_eos, ask.text) == (None, None, False, TextOptions())
    assert (ask.sampling, ask.n, ask.num_choices) == (SamplingParams(1), 1, 1)


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
    assert ask.prompts[0].chat == chat(("system", "be kind"), ("user", "ab"))
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
    raw = b'{"model": "a", "model": "m", "prompt": 5, "prompt": "x", "n": 0, "n": 1}'
    assert parse_body(raw, CompletionBody).ask("").model == "m"
    with pytest.raises(InvalidRequest):
        parse_body(b'{"model": "m", "prompt": "x", "n": 1, "n": 0}', CompletionBody)


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
