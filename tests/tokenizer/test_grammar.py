"""Grammars over a vocabulary: what may come next, and what is refused before anything comes."""

from dataclasses import replace

import numpy as np
import pytest

from core.errors import EngineFailed, InvalidRequest
from tokenizer.files import load_tokenizer_files
from tokenizer.grammar import build_tokenizer, compile_grammar, fill_mask, lark, new_mask

END = 258


def allowed(matcher, size: int = 512) -> set[int]:
    mask = new_mask(size)
    fill_mask(matcher, mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_the_mask_says_what_may_follow_and_the_end_when_nothing_else_may(vocabulary):
    matcher = compile_grammar(vocabulary, lark('start: "ab" | "é"'))
    assert allowed(matcher) == {ord("a"), 0xC3}
    assert matcher.consume_tokens(list(b"ab"))
    assert allowed(matcher) == {END}


def test_a_control_token_is_no_text(vocabulary):
    assert allowed(compile_grammar(vocabulary, lark("start: /(.|\\n)*/"))).isdisjoint({256, 257})


def test_logits_may_be_wider_than_the_vocabulary(tiny_model):
    wide = build_tokenizer(load_tokenizer_files(tiny_model), 1000)
    assert allowed(compile_grammar(wide, lark("start: /[^z]/")), 1000) <= set(range(512)) - {ord("z")}


@pytest.mark.parametrize("rules", ["start: /[/", "start: %json false", "start: start", 'start: "a', "", "%%"])
def test_what_is_no_grammar_or_allows_nothing_is_refused(vocabulary, rules):
    with pytest.raises(InvalidRequest) as caught:
        compile_grammar(vocabulary, lark(rules))
    assert str(caught.value)
    assert "llguidance {" not in str(caught.value)


def test_a_grammar_beyond_the_limits_is_refused(vocabulary):
    alternatives = " | ".join(f'"{index}" r{index % 7}' for index in range(20_000))
    rules = "\n".join(f'r{index}: "x" | "y" start' for index in range(7))
    with pytest.raises(InvalidRequest, match="too big"):
        compile_grammar(vocabulary, lark(f"start: {alternatives}\n{rules}"))


def test_a_model_whose_outputs_have_no_end_follows_no_grammar(tiny_model):
    with pytest.raises(EngineFailed, match="end-of-sequence"):
        build_tokenizer(replace(load_tokenizer_files(tiny_model), eos_token_ids=()))
