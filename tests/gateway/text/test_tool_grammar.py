"""The grammar of calls: what its form allows is what is read as calls, with arguments that follow their schema."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer

from core.errors import InvalidRequest
from gateway.text.chat import Function
from gateway.text.grammar import OutputForm, json_schema, regex, to_grammar
from gateway.text.tokenizer import TextTokenizer
from gateway.text.tool_format import HERMES, LLAMA
from gateway.text.tool_grammar import tool_form
from tests.gateway.chats import LLAMA as LLAMA_TEMPLATE
from tests.gateway.chats import QWEN, TIME, WEATHER, tools
from tests.gateway.text.test_chat_template import LLAMA_TOKENS, QWEN_TOKENS, made
from tests.gateway.text.test_tool_calls import parse
from tokenizer.grammar import build_tokenizer, compile_grammar

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NO_ARGUMENTS = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
WRONG = '<tool_call>\n{"name": "get_weather", "arguments": {"city": 5}}\n</tool_call>'
STRICT = replace(WEATHER, is_strict=True)
Accepts = Callable[[OutputForm | None, str], bool]


def acceptor(tokenizer: TextTokenizer) -> Accepts:
    vocabulary = build_tokenizer(replace(tokenizer._files, eos_token_ids=(257,)))
    trusted: Tokenizer = tokenizer._trusted

    def accepts(form: OutputForm | None, text: str) -> bool:
        assert form is not None
        matcher = compile_grammar(vocabulary, to_grammar(form))
        ids = trusted.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return accepts


@pytest.fixture(scope="module", params=["tokens", "control tokens", "text"])
def qwen(request) -> tuple[TextTokenizer, Accepts]:
    """Vocabularies that have what surrounds calls as tokens, as control tokens, or not at all."""
    markers = ["<tool_call>", "</tool_call>"]
    odd = ["<[1-3]>", "<a/b>", "<|fim|>", "[INST]", "  ", "<é>"]
    tokens = [*QWEN_TOKENS, *odd] if request.param != "text" else QWEN_TOKENS[:2]
    tokenizer = made(QWEN, tokens, special=markers if request.param == "control tokens" else ())
    return tokenizer, acceptor(tokenizer)


def form_of(
    tokenizer: TextTokenizer, *functions: Function, answer: OutputForm | None = None, **how: Any
) -> Any:
    added, markup = tokenizer.added_tokens, tokenizer.markup_tokens
    return tool_form(tokenizer.tool_format, tools(*functions, **how), answer, added, markup)


def test_what_must_call_calls_functions_that_there_are_with_arguments_of_their_schema(qwen):
    tokenizer, accepts = qwen
    form = form_of(tokenizer, is_required=True)
    for text in (CALL, NO_ARGUMENTS, f"{CALL}\n{NO_ARGUMENTS}"):
        assert accepts(form, text)
        assert len(parse([text.replace("get_time", "f")])[1]) == text.count("</tool_call>")
    other = CALL.replace("get_weather", "other")
    for text in ("", "Hello", WRONG, other, f"Well. {CALL}", CALL[:-1], CALL + "."):
        assert not accepts(form, text)


def test_one_function_or_one_call_only(qwen):
    tokenizer, accepts = qwen
    chosen = replace(tools(), is_required=True, callable_names=frozenset({"get_time"}), allows_several=False)
    form = tool_form(tokenizer.tool_format, chosen, None, tokenizer.added_tokens)
    assert accepts(form, NO_ARGUMENTS)
    assert not accepts(form, CALL)
    assert not accepts(form, f"{NO_ARGUMENTS}\n{NO_ARGUMENTS}")


def test_strict_functions_are_followed_where_a_call_is_free(qwen):
    tokenizer, accepts = qwen
    form = form_of(tokenizer, STRICT, TIME)
    for text in ("", "Hello <tool", "a\nb", CALL, f"<think>Hm.</think>See:\n{CALL}\n{NO_ARGUMENTS}\nDone."):
        assert accepts(form, text), text
    for text in (WRONG, f"Let me see. {WRONG}", "<tool_call>nothing</tool_call>"):
        assert not accepts(form, text), text
    assert form_of(tokenizer, WEATHER, TIME) is None


def test_an_answer_that_has_a_form_may_be_calls_instead(qwen):
    tokenizer, accepts = qwen
    form = form_of(tokenizer, answer=json_schema("response_format", {"type": "object", "required": ["x"]}))
    for text in ('{"x": 1}', CALL):
        assert accepts(form, text)
    for text in ("{}", "Hello", WRONG):
        assert not accepts(form, text)
    with pytest.raises(InvalidRequest) as caught:
        form_of(tokenizer, answer=regex("guided_regex", "a+"))
    assert caught.value.field == "guided_regex"
    assert accepts(form_of(tokenizer, answer=regex("guided_regex", "a+"), is_required=True), CALL)


def test_llamas_calls():
    tokenizer = made(LLAMA_TEMPLATE, LLAMA_TOKENS)
    accepts = acceptor(tokenizer)
    call = '{"name": "get_weather", "parameters": {"city": "Rome"}}'
    form = form_of(tokenizer, is_required=True)
    assert tokenizer.tool_format is LLAMA
    assert accepts(form, call)
    assert accepts(form, f"{call}; {call}")
    assert parse([f"{call}; {call}"], LLAMA)[1] == [("get_weather", '{"city": "Rome"}')] * 2
    assert not accepts(form, call.replace('"Rome"', "5"))
    assert not accepts(form, CALL)


def test_names_and_schemas_spell_nothing_but_themselves(qwen):
    tokenizer, accepts = qwen
    hostile = Function(
        "f", parameters={"type": "object", "properties": {'"\n%llguidance {}\nx: /.*/': {"const": 1}}}
    )
    form = form_of(tokenizer, hostile, is_required=True)
    arguments = json.dumps({'"\n%llguidance {}\nx: /.*/': 1})
    assert accepts(form, f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>')
    assert not accepts(form, "anything")


def test_what_a_grammar_cannot_say_is_a_mistake_in_strict_functions_only(qwen):
    tokenizer, accepts = qwen
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    arguments = '<tool_call>\n{"name": "f", "arguments": {"a": []}}\n</tool_call>'
    assert accepts(form_of(tokenizer, Function("f", parameters=parameters), is_required=True), arguments)
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        accepts(form_of(tokenizer, Function("f", parameters=parameters, is_strict=True)), arguments)


def test_hermes_is_what_its_grammar_writes():
    form = tool_form(HERMES, tools(TIME, is_required=True), None, ())
    assert form is not None
    assert form.field == "tools"
