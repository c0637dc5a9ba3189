"""Calls in an output's text, however it is cut into pieces; what is no call is content, and nothing is lost."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.text.tool_calls import CallDelta, Parsed, ToolCallParser, joined_calls
from gateway.text.tool_format import HERMES, LLAMA, ToolFormat

NAMES = frozenset({"f", "get_weather"})
F = '{"name": "f", "arguments": {"a": [1, "}"]}}'
ONE = f"<tool_call>\n{F}\n</tool_call>"


def parse(
    text: str | Sequence[str], form: ToolFormat = HERMES, allows_several: bool = True
) -> tuple[str, list[tuple[str, str]], list[CallDelta]]:
    """Content, (name, arguments) of each call, and the deltas that said so."""
    parser = ToolCallParser(form, NAMES, allows_several)
    parts = [parser.push(piece) for piece in text]
    whole = Parsed()
    for part in [*parts, parser.finish()]:
        whole.content += part.content
        whole.calls += part.calls
    return whole.content, [(call.name, call.arguments) for call in joined_calls(whole.calls)], whole.calls


HERMES_TEXTS = [
    (ONE, "", [("f", '{"a": [1, "}"]}')]),
    (f"Let me see.\n{ONE}", "Let me see.", [("f", '{"a": [1, "}"]}')]),
    (f"{ONE}\n{ONE}", "", [("f", '{"a": [1, "}"]}')] * 2),
    (f"{ONE}{ONE}\n", "", [("f", '{"a": [1, "}"]}')] * 2),
    (f"{ONE}\n\nDone.", "Done.", [("f", '{"a": [1, "}"]}')]),
    ("no calls\n", "no calls\n", []),
    ("a <tool_ call> < <tool_call", "a <tool_ call> < <tool_call", []),
    ('<tool_call>{"name":"f","arguments":{}}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"arguments": {"é": "日"}, "name": "f"}</tool_call>', "", [("f", '{"é": "日"}')]),
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    (
        '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {}}}</tool_call>',
        "",
        [("f", "{}")],
    ),
    (
        '<tool_call>{"name": "f", "arguments": {"a": "\\"}{\\\\"}}</tool_call>',
        "",
        [("f", '{"a": "\\"}{\\\\"}')],
    ),
    (
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": {"x": "}"}}</tool_call>!',
        "!",
        [("f", '{"a": 1}')],
    ),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>.', ".", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}} and more', "and more", [("f", '{"a": 1}')]),
    (
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
        "",
        [("f", '{"a": "</tool_call>"}')],
    ),
    (
        '<tool_call>{"arguments": {"a": "\\ud83d\\ude00"}, "name": "f"}</tool_call>',
        "",
        [("f", '{"a": "😀"}')],
    ),
    # malformed in many ways, and of functions that there are not
    ('<tool_call>{"name": "g", "arguments": {}}</tool_call>', None, []),
    ('<tool_call>{"arguments": {}, "name": "g"}</tool_call>', None, []),
    ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, []),
    ('<tool_call>{"name": "f", "arguments": "no JSON"}</tool_call>', None, []),
    ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', None, []),
    ('<tool_call>{"type": "x", "city": "Paris"}</tool_call>', None, []),
    ("<tool_call>{'name': 'f'}</tool_call>", None, []),
    ("<tool_call>f()</tool_call>", None, []),
    ("<tool_call></tool_call>", None, []),
    ('<tool_call>{"arguments": {"a": "\\ud83d"}, "name": "f"}</tool_call>', None, []),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud83d\\"}"}</tool_call>', None, []),
    ('<tool_call>{"arguments": ' + '{"a":' * 5000, None, []),
    ('<tool_call>{"arguments": ' + "[" * 5000 + "]" * 5000 + "}", None, []),
    ('<tool_call>{"id": 1, "name": "f", "arguments": {"a"', None, []),
    ("<tool_call>   ", None, []),
    (f"<tool_call>{ONE}", "<tool_call>", [("f", '{"a": [1, "}"]}')]),
    # cut off
    ('<tool_call>{"name": "f", "arguments": {"a": "x', "", [("f", '{"a": "x')]),
    ('<tool_call>{"name": "f", "argu', None, []),
    (f"{ONE}\n<tool_call>\n{F}\n</tool_c", "", [("f", '{"a": [1, "}"]}')] * 2),
]
L = '{"name": "f", "parameters": {"a": [1, "}"]}}'
LLAMA_TEXTS = [
    (L, "", [("f", '{"a": [1, "}"]}')]),
    (f"\n {L}", "", [("f", '{"a": [1, "}"]}')]),
    (f"{L}; {L}", "", [("f", '{"a": [1, "}"]}')] * 2),
    (f"{L}\n{L}", "", [("f", '{"a": [1, "}"]}')] * 2),
    (f"<|python_tag|>{L}", "", [("f", '{"a": [1, "}"]}')]),
    (f"Well. <|python_tag|>{L};<|python_tag|>{L}", "Well.", [("f", '{"a": [1, "}"]}')] * 2),
    ('{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ('{"city": "Paris", "name": "f"}', None, []),
    (f"Look: {L}", None, []),
    ("<|python_tag|>print(1)", None, []),
    ('{"name": "Paris", "parameters": {}}', None, []),
    ('{"name": "f", "parameters": {}} is how.', "is how.", [("f", "{}")]),
    (" " * 100, None, []),
    ("plain", None, []),
]


def cuts(text: str) -> list[list[str]]:
    """One piece, single characters, and pieces of three."""
    return [[text], list(text), [text[at : at + 3] for at in range(0, len(text), 3)]]


@pytest.mark.parametrize(("text", "content", "calls"), HERMES_TEXTS, ids=lambda value: str(value)[:40])
def test_hermes_calls_are_told_and_all_else_is_content(text, content, calls):
    for pieces in cuts(text):
        assert parse(pieces)[:2] == (text if content is None else content, calls)


@pytest.mark.parametrize(("text", "content", "calls"), LLAMA_TEXTS, ids=lambda value: str(value)[:40])
def test_llama_calls_are_told_and_all_else_is_content(text, content, calls):
    for pieces in cuts(text):
        assert parse(pieces, LLAMA)[:2] == (text if content is None else content, calls)


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        F,
        L,
        "\n",
        " ",
        "{",
        "}",
        '"',
        "\\",
        "é",
        "text",
        ";",
        "<",
        "tool",
    ]
)


@given(st.lists(FRAGMENTS, max_size=8), st.sampled_from([HERMES, LLAMA]), st.data())
@example(["<tool_call>", "<tool_call>", F], HERMES, None)
def test_how_the_text_is_cut_changes_nothing(fragments, form, data):
    text = "".join(fragments)
    places = sorted(data.draw(st.sets(st.integers(1, max(len(text) - 1, 1))))) if data else range(len(text))
    pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    content, calls, _ = parse(pieces, form)
    assert (content, calls) == parse([text], form)[:2]
    for _, arguments in calls:
        assert json.loads(arguments) == {"a": [1, "}"]}


@given(
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "{", '"a"', ":", "x", " ", "\n"]), max_size=12)
)
def test_without_a_call_nothing_is_lost(fragments):
    text = "".join(fragments)
    content, calls, _ = parse(list(text))
    assert (content, calls) == (text, [])


def test_a_call_is_told_as_openai_does():
    pieces = ["<tool", '_call>{"name": "f", "argu', 'ments": {"a', '": "long', ' text"}', "}</tool_call>"]
    _, _, deltas = parse(pieces)
    first, *rest = deltas
    assert (first.index, first.name, first.arguments) == (0, "f", "")
    assert first.call_id.startswith("call_")
    assert rest == [CallDelta(0, piece) for piece in ('{"a', '": "long', ' text"}')]


def test_calls_have_ids_and_numbers_of_their_own():
    deltas = [delta for delta in parse([ONE + ONE])[2] if delta.call_id]
    assert [delta.index for delta in deltas] == [0, 1]
    assert len({delta.call_id for delta in deltas}) == 2


def test_content_before_a_call_is_told_before_the_call_is_there():
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.push("Let me see. ").content == "Let me see."
    assert parser.push("<tool").content == ""
    assert parser.push("box").content == " <toolbox"


def test_an_answer_in_json_that_begins_like_no_call_is_told_at_once():
    parser = ToolCallParser(LLAMA, NAMES)
    assert parser.push('{"city":').content == '{"city":'
    assert parser.push(' "Paris').content == ' "Paris'


def test_the_first_call_is_the_last_where_there_may_be_one():
    parser = ToolCallParser(HERMES, NAMES, allows_several=False)
    parser.push(ONE[:-1])
    assert parser.is_done
    assert parser.push(">" + ONE) == parser.finish() == Parsed()
    assert parser.num_calls == 1


def test_the_cost_of_a_hostile_text_does_not_grow_with_its_square():
    """Markers of calls that never end, each opening what the others are in."""
    text = '<tool_call>{"id": "' * 20_000
    assert parse([text[at : at + 100] for at in range(0, len(text), 100)])[0] == text
