"""What a grammar lets follow: per sequence, kept up with its tokens, compiled while others run."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from core.errors import EngineFailed, InvalidRequest
from core.kv_spec import DType
from core.sampling import SamplingParams
from engine.config import EngineConfig
from engine.guided import Guide, GuideFactory
from engine.llm import LLM
from engine.logit_edits import apply_edits
from engine.logit_rules import LogitEdits, LogitRules, RuledRow
from tokenizer.files import load_tokenizer_files
from tokenizer.grammar import lark

VOCAB = 512
END = 258
PROMPT = list(b"some prompt ")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " ?"},
}
SCHEMA = lark(f"start: %json {json.dumps(PERSON)}")
GREEDY = SamplingParams(max_tokens=100, temperature=0.0, stop_token_ids=(END,), grammar=SCHEMA)


@pytest.fixture(scope="module")
def factory(tiny_model: Path) -> Iterator[GuideFactory]:
    factory = GuideFactory(tiny_model, VOCAB)
    yield factory
    factory.close()


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    torch.set_num_threads(1)
    llm = LLM(EngineConfig(str(tiny_model), DType.FLOAT32, num_blocks=256, token_budget=64))
    yield llm
    llm.close()


def ready(factory: GuideFactory, rules: str) -> Guide:
    guide = factory.guide(lark(rules))
    assert guide is not None
    guide.wait()
    return guide


def allowed(guide: Guide, output: bytes | list[int]) -> set[int]:
    mask = guide.mask(list(output))
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_without_a_grammar_there_is_nothing_to_follow(factory):
    assert factory.guide("") is None


def test_a_guide_says_what_may_follow_the_tokens_there_are(factory):
    guide = ready(factory, 'start: "ab" | "cd"')
    assert guide.is_ready and guide.error is None
    assert allowed(guide, b"") == {ord("a"), ord("c")}
    assert allowed(guide, b"") == {ord("a"), ord("c")}, "asked again, it says the same"
    assert allowed(guide, b"a") == {ord("b")}
    assert not guide.is_complete
    assert allowed(guide, b"ab") == {END}
    assert guide.is_complete


def test_it_takes_up_an_output_in_the_middle(factory):
    steps, at_once = (ready(factory, "start: /[a-c]{3,5}x/") for _ in range(2))
    for length in range(4):
        expected = allowed(steps, b"abca"[:length])
    assert allowed(at_once, b"abc") == expected


def test_two_of_one_grammar_do_not_know_of_each_other(factory):
    one, other = (ready(factory, "start: /ab/") for _ in range(2))
    assert allowed(one, b"a") == {ord("b")}
    assert allowed(other, b"") == {ord("a")}


def test_tokens_that_do_not_follow_the_grammar_are_its_end(factory):
    guide = ready(factory, "start: /ab/")
    assert allowed(guide, b"b") == set()
    assert isinstance(guide.error, InvalidRequest)
    assert not guide.is_complete


def test_what_is_no_grammar_is_the_guides_error(factory):
    guide = ready(factory, "start: /[/")
    assert isinstance(guide.error, InvalidRequest)


def test_a_vocabulary_that_is_none_is_the_guides_error(tmp_path):
    factory = GuideFactory(tmp_path, VOCAB)
    factory.prepare()
    assert "tokenizer.json" in str(ready(factory, 'start: "a"').error)
    factory.close()


def test_compiling_keeps_nobody_waiting_and_tells_when_it_is_done(tiny_model):
    told, may_compile = threading.Event(), threading.Event()
    factory = GuideFactory(tiny_model, VOCAB)
    factory.on_ready = told.set
    factory._thread.submit(may_compile.wait)  # what the thread has to do before
    guide = factory.guide(lark('start: "a"'))
    assert guide is not None and not guide.is_ready and guide.error is None
    may_compile.set()
    assert told.wait(60) and guide.is_ready
    factory.close()


def test_masked_rows_keep_what_the_grammar_allows(factory):
    params = SamplingParams(max_tokens=9, grammar="x")
    rules = [
        LogitRules(params, ready(factory, 'start: "é"')),
        LogitRules(replace(params, grammar="", logit_bias=((7, 1.0),))),
        LogitRules(params, ready(factory, "start: /[^a]/")),
    ]
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    apply_edits(logits, LogitEdits.build([RuledRow(rule, [1, 2], 2) for rule in rules]))
    assert logits[0].isfinite().nonzero().flatten().tolist() == [0xC3]
    assert logits[1].isfinite().all()
    kept = logits[2].isfinite()
    assert ord("b") in kept.nonzero() and ord("a") not in kept.nonzero()
    assert torch.equal(logits[2][kept], before[2][kept])


def test_answers_follow_the_schema_greedy_or_drawn_alone_or_in_a_batch(llm, tiny_model):
    tokenizer = load_tokenizer_files(tiny_model).tokenizer
    each = [GREEDY, *(replace(GREEDY, temperature=1.5, seed=seed, num_logprobs=2) for seed in range(5))]
    each.append(replace(GREEDY, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3))
    together = llm.generate([PROMPT] * len(each), each)
    for params, answer in zip(each, together, strict=True):
        assert answer.finish_reason == "stop"
        person = json.loads(tokenizer.decode(answer.token_ids))
        assert isinstance(person["name"], str) and person["age"] <= 99
        assert llm.generate([PROMPT], params)[0].token_ids == answer.token_ids


def test_min_tokens_does_not_keep_a_complete_answer_from_its_end(llm):
    params = replace(GREEDY, grammar=lark('start: "ab" "c"?'), min_tokens=3)
    assert llm.generate([PROMPT], params)[0].token_ids == [*b"abc", END]
    assert llm.generate([PROMPT], replace(params, min_tokens=4))[0].token_ids == [*b"abc", END]


def test_what_leaves_nothing_to_draw_is_the_requests_own_mistake(llm):
    with pytest.raises(InvalidRequest, match="no token"):
        llm.generate([PROMPT], replace(GREEDY, allowed_token_ids=(ord("z"),)))
    with pytest.raises(InvalidRequest, match="unclosed"):
        llm.generate([PROMPT], replace(GREEDY, grammar=lark("start: /[/")))
    assert llm.generate([PROMPT], GREEDY)[0].finish_reason == "stop"


def test_an_ambiguous_grammar_ends_its_own_request_within_the_limits(llm):
    ambiguous = replace(GREEDY, grammar=lark('start: e\ne: e e e e | e e e | e e | "a"'), max_tokens=200)
    with pytest.raises(InvalidRequest, match="cannot be followed"):
        llm.generate([PROMPT], replace(ambiguous, min_tokens=200))


def test_an_engine_of_a_model_without_an_end_takes_no_grammar(tiny_model, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((tiny_model / "tokenizer.json").read_bytes())
    factory = GuideFactory(tmp_path, VOCAB)
    assert isinstance(ready(factory, 'start: "a"').error, EngineFailed)
    factory.close()


def test_a_guide_knows_what_its_masks_cost(factory):
    slow, usual = ready(factory, 'start: e\ne: e e e e | e e e | e e | "a"'), ready(factory, 'start: "a"*')
    for guide in (slow, usual):
        guide.mask(list(b"a" * 30))
    assert slow.mask_s > 10 * usual.mask_s > 0
