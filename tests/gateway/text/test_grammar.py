"""What clients ask of an output's form: one grammar, or their own mistake, told before any work and without anybody
else having to wait."""

import asyncio
import json
import os
import signal
import time
from typing import Any

import pytest
import pytest_asyncio

from core.errors import Busy, InvalidRequest
from gateway.text.grammar import (
    MAX_FORM_CHARACTERS,
    MAX_FORM_DEPTH,
    OutputForm,
    choice,
    grammar,
    json_object,
    json_schema,
    only_form,
    regex,
    response_format,
    structured_outputs,
    to_grammar,
)
from gateway.text.grammar_checker import MAX_WAITING, GrammarChecker
from tokenizer.files import load_tokenizer_files
from tokenizer.grammar import build_tokenizer, compile_grammar


def ref_chain(length: int) -> dict[str, Any]:
    links = {f"A{index}": {"$ref": f"#/$defs/A{index + 1}"} for index in range(length)}
    return {"$ref": "#/$defs/A0", "$defs": {**links, f"A{length}": {"type": "string"}}}


def mapping(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def optional(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "string"}}}


@pytest.fixture(scope="module")
def accepts(tiny_model):
    """`accepts(form, text)`: whether `text` is a whole output of that form."""
    vocabulary = build_tokenizer(load_tokenizer_files(tiny_model))

    def check(form: OutputForm | None, text: str) -> bool:
        assert form is not None
        matcher = compile_grammar(vocabulary, to_grammar(form))
        ids = list(text.encode())
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return check


@pytest_asyncio.fixture
async def checker(tiny_model):
    checker = GrammarChecker(tiny_model)
    yield checker
    await checker.close()


def test_json_is_an_object_and_nothing_else(accepts):
    form = response_format({"type": "json_object"})
    assert accepts(form, '{"a": [1, {}]}')
    assert accepts(form, json.dumps({"a": [1, {"b": None}]}, indent=4))
    assert not accepts(form, "[1]")
    assert not accepts(form, '{"a": 1')
    assert not accepts(form, '{"a": 1}\n')


def test_a_schema_is_the_same_however_it_is_named(accepts):
    schema = mapping(age={"type": "integer"})
    forms = [
        response_format({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}),
        structured_outputs("structured_outputs", {"json": schema}),
        structured_outputs("structured_outputs", {"json": json.dumps(schema), "regex": None}),
        json_schema("guided_json", schema),
    ]
    for form in forms:
        assert accepts(form, '{"age": 7}')
        assert not accepts(form, '{"age": "7"}')
        assert not accepts(form, "{}")


def test_whitespace_in_json_has_a_bound_that_no_schema_lifts(accepts):
    form = json_schema("json", {"type": "object", "x-guidance": {"whitespace_pattern": "[ \n]+"}})
    assert accepts(form, '{\n        "a": 1}')
    assert not accepts(form, "{" + "\n" * 3 + '"a": 1}')
    assert not accepts(form, "{" + " " * 25 + '"a": 1}')


def test_a_regex_is_of_the_whole_output(accepts):
    assert accepts(regex("regex", r"\d{2}/[a-z]+"), "12/ab")
    assert accepts(regex("regex", r"^\d+$"), "12")
    assert not accepts(regex("regex", r"\d"), "12")
    assert accepts(regex("regex", r"\{20000\}a"), "{20000}a")


def test_a_choice_is_one_of_the_texts(accepts):
    texts = ['say "hi"\n', "日本", "a|b", "/*"]
    for text in texts:
        assert accepts(choice("choice", texts), text)
    assert not accepts(choice("choice", texts), "a")


@pytest.mark.parametrize("rules", ['start: "x" /[0-9]+/', 'root ::= "x" digit+\ndigit ::= [0-9]'])
def test_a_grammar_is_lark_or_ebnf(accepts, rules):
    assert accepts(grammar("grammar", rules), "x12")
    assert not accepts(grammar("grammar", rules), "12")


def test_recursion_is_followed(accepts):
    tree = mapping(children={"type": "array", "items": {"$ref": "#"}})
    assert accepts(json_schema("json", tree), '{"children": [{"children": []}]}')
    both = {"A": mapping(b={"type": "array", "items": {"$ref": "#/$defs/B"}}), "B": {"$ref": "#/$defs/A"}}
    assert accepts(json_schema("json", {"$ref": "#/$defs/A", "$defs": both}), '{"b": [{"b": []}]}')


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"type": "xml"}, "response_format"),
        ({}, "response_format"),
        ("json_object", "response_format"),
        ({"type": "json_schema"}, "response_format"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": "bar"}}, "response_format"),
    ],
)
def test_a_response_format_that_is_none_is_refused(value, field):
    with pytest.raises(InvalidRequest) as caught:
        response_format(value)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"json": {}, "regex": "a"},
        {"regex": "a", "whitespace_pattern": " "},
        {"structural_tag": "x"},
        {"json_object": True, "choice": ["a"]},
        {"choice": []},
        {"choice": [1]},
        {"regex": ""},
        {"grammar": 1},
        {"json": "{"},
        {"json": [1]},
        {"json": '{"a":' * 5000 + "1" + "}" * 5000},
        {"json": json.loads('{"a":' * MAX_FORM_DEPTH + "1" + "}" * MAX_FORM_DEPTH)},
        {"regex": "a" * (MAX_FORM_CHARACTERS + 1)},
        {"choice": [f"{index:020}" for index in range(MAX_FORM_CHARACTERS // 20 + 1)]},
        {"json": {"const": 10**5000}},
        [],
    ],
)
def test_structured_outputs_that_are_none_are_refused_at_once(value):
    with pytest.raises(InvalidRequest) as caught:
        structured_outputs("structured_outputs", value)
    assert caught.value.field.startswith("structured_outputs")


def test_an_output_takes_one_form_only():
    assert only_form([]) is None
    assert only_form([json_object("response_format")]) == json_object("response_format")
    with pytest.raises(InvalidRequest, match=r"response_format and guided_regex"):
        only_form([json_object("response_format"), regex("guided_regex", "a")])


REFUSED = {
    "an unclosed class": regex("f", "["),
    "look-behind": regex("f", "(?<=x)*a"),
    "a million repeats": regex("f", "a{1000000}"),
    "5000 open groups": regex("f", "(" * 5000),
    "5000 nested groups": regex("f", "(" * 5000 + "a" + ")" * 5000),
    "a property that is no schema": json_schema("f", mapping(foo="bar")),
    "an unknown type": json_schema("f", {"type": "foo"}),
    "no grammar at all": grammar("f", "<<< ::= >>>"),
    "an unknown rule": grammar("f", "root ::= x"),
    "a rule nested 5000 times": grammar("f", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    "options of the library": grammar("f", '%llguidance {"no_forcing": false}\nstart: "a"'),
    "itself": json_schema("f", {"$ref": "#"}),
    "each other": json_schema(
        "f", {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}}
    ),
    "a reference to nothing": json_schema("f", {"$ref": "#/$defs/missing"}),
    "a reference elsewhere": json_schema("f", {"$ref": "http://169.254.169.254/"}),
    "oneOf of 500 that overlap": json_schema("f", {"oneOf": [mapping(**{f"k{i}": {}}) for i in range(500)]}),
    "a thousand combinations": json_schema(
        "f", {"allOf": [{"anyOf": [optional(f"k{i}"), optional(f"j{i}")]} for i in range(10)]}
    ),
    "a lone surrogate": choice("f", ["\ud800"]),
}


async def test_what_cannot_be_compiled_is_the_clients_mistake(checker):
    for name, form in REFUSED.items():
        with pytest.raises(InvalidRequest) as caught:
            await checker.check(form)
        assert caught.value.field == "f", name
        assert str(caught.value).startswith("f: "), name


async def test_what_is_large_but_harmless_is_accepted(checker):
    forms = [
        json_schema("f", {"enum": [f"value-{index}" for index in range(10_000)]}),
        json_schema("f", {"oneOf": [mapping(kind={"const": f"k{index}"}) for index in range(100)]}),
        json_schema("f", {"anyOf": [mapping(**{f"k{index}": {}}) for index in range(500)]}),
    ]
    for form in forms:
        assert await checker.check(form) == to_grammar(form)


async def test_what_ends_the_child_or_takes_too_long_harms_nobody_else(checker):
    """A chain of references that needs more stack than there is; properties that cost time in their square."""
    fatal = {
        "nested too deeply": json_schema("f", ref_chain(10_000)),
        "takes longer": json_schema("f", {"properties": {f"k{index}": {} for index in range(10_000)}}),
    }
    gaps: list[float] = []
    beating = asyncio.create_task(beat(gaps))
    started_s = time.perf_counter()
    for reason, form in fatal.items():
        with pytest.raises(InvalidRequest, match=reason):
            await checker.check(form)
        assert await checker.check(regex("f", f"after {reason}"))
    elapsed_s = time.perf_counter() - started_s
    beating.cancel()
    assert max(gaps) < elapsed_s / 4, "the event loop ran all the while"


async def beat(gaps: list[float]) -> None:
    last_s = time.perf_counter()
    while True:
        await asyncio.sleep(0.001)
        now_s = time.perf_counter()
        gaps.append(now_s - last_s)
        last_s = now_s


async def test_what_every_choice_compiles_again_may_not_take_too_long_together(checker):
    form = choice("f", [f"{index:05}" for index in range(10_000)])
    grammar = await checker.check(form)
    assert grammar == await checker.check(form, 2)
    with pytest.raises(InvalidRequest, match="too long for 1000000 choices"):
        await checker.check(form, 10**6)


async def test_a_verdict_is_remembered_whatever_the_field_is_called(checker):
    good, bad = regex("f", "a+"), regex("f", "[")
    first = await checker.check(good)
    with pytest.raises(InvalidRequest):
        await checker.check(bad)
    await checker.close()
    assert await checker.check(regex("other", "a+")) == first
    with pytest.raises(InvalidRequest, match="other"):
        await checker.check(regex("other", "["))
    assert checker._child is None, "nothing was asked of a new child"


async def test_those_who_would_wait_too_long_are_told_so(checker):
    checks = [asyncio.create_task(checker.check(regex("f", f"a{index}"))) for index in range(MAX_WAITING + 1)]
    *answered, refused = await asyncio.gather(*checks, return_exceptions=True)
    assert {type(answer) for answer in answered} == {str}
    assert isinstance(refused, Busy)


async def test_a_client_that_leaves_takes_no_answer_from_the_next(checker):
    leaving = asyncio.create_task(checker.check(regex("f", "a")))
    staying = asyncio.create_task(checker.check(regex("f", "b")))
    await asyncio.sleep(0.05)
    leaving.cancel()
    assert await staying == to_grammar(regex("f", "b"))


async def test_a_child_that_somebody_killed_is_no_fault_of_the_next_form(checker):
    await checker.check(regex("f", "a"))
    os.kill(checker._child.pid, signal.SIGKILL)
    assert await checker.check(regex("f", "b")) == to_grammar(regex("f", "b"))


async def test_a_model_without_an_end_has_no_grammars(tmp_path, tiny_model):
    (tmp_path / "tokenizer.json").write_bytes((tiny_model / "tokenizer.json").read_bytes())
    checker = GrammarChecker(tmp_path)
    with pytest.raises(InvalidRequest, match=r"f: .*end-of-sequence"):
        await checker.check(regex("f", "a"))
