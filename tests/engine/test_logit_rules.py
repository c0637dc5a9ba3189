"""Penalties, bias, bans and min_p against plain definitions, and whatever the rows beside."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.sampling import SamplingParams
from engine.logit_edits import apply_edits
from engine.logit_rules import LogitEdits, LogitRules, RuledRow, TokenCounts
from engine.sampler import SamplingBatch, SamplingRow, likeliest, sample

VOCAB = 40
TOKENS = st.integers(0, VOCAB - 1)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(99),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.6]),
    stop_token_ids=st.lists(TOKENS, max_size=2).map(tuple),
    min_tokens=st.integers(0, 4),
    presence_penalty=st.sampled_from([0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    logit_bias=st.dictionaries(TOKENS, st.floats(-5, 5, width=32), max_size=3).map(
        lambda d: tuple(d.items())
    ),
    allowed_token_ids=st.one_of(st.just(()), st.lists(TOKENS, min_size=5, max_size=20).map(tuple)),
    bad_words=st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
)
ROWS = st.tuples(PARAMS, st.lists(TOKENS, min_size=1, max_size=6), st.lists(TOKENS, max_size=6))


def by_definition(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]
) -> list[float]:
    """One token at a time, as the documentation of the fields says it."""
    changed = []
    for token, logit in enumerate(logits):
        tokens = [*prompt, *output]
        is_bad = any(
            word[-1] == token and tuple(output[len(output) - len(word) + 1 :]) == word[:-1]
            for word in params.bad_words
            if len(word) - 1 <= len(output)
        )
        too_early = token in params.stop_token_ids and len(output) < params.min_tokens
        if (params.allowed_token_ids and token not in params.allowed_token_ids) or is_bad or too_early:
            changed.append(-math.inf)
            continue
        logit += dict(params.logit_bias).get(token, 0.0)
        if token in tokens:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * output.count(token)
        logit -= params.presence_penalty * (token in output)
        changed.append(logit)
    peak = max(changed)
    if params.min_p and params.temperature:
        least = math.log(params.min_p) * params.temperature
        changed = [logit if logit >= peak + least - 1e-6 else -math.inf for logit in changed]
    return changed


def norms(logits: torch.Tensor) -> torch.Tensor:
    return logits.double().logsumexp(-1)


def ruled(params: SamplingParams, prompt: list[int], output: list[int]) -> RuledRow:
    return RuledRow(LogitRules(params), [*prompt, *output], len(prompt))


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=150, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=5))
def test_each_row_is_changed_as_its_own_parameters_say(rows):
    logits = random_logits(len(rows))
    changed = logits.clone()
    apply_edits(changed, LogitEdits.build([ruled(*row) for row in rows]))
    for row, (params, prompt, output) in enumerate(rows):
        expected = by_definition(logits[row].tolist(), params, prompt, output)
        if params.min_p < 1.0:
            np.testing.assert_allclose(changed[row].numpy(), expected, rtol=1e-5, atol=1e-5)
        elif params.temperature:
            assert changed[row].argmax() == np.argmax(expected)


@settings(max_examples=60, deadline=None)
@given(st.lists(ROWS, min_size=2, max_size=5), st.integers(0, 2**32))
def test_a_token_depends_on_no_other_row_and_not_on_when_its_rules_were_made(rows, seed):
    logits = random_logits(len(rows), 1)

    def row_of(params: SamplingParams, rules: RuledRow) -> SamplingRow:
        return SamplingRow(params, seed, 3, rules if params.changes_logits else None)

    grown = []
    for params, prompt, output in rows:
        rules = LogitRules(params)
        for length in range(len(output) + 1):
            LogitEdits.build([RuledRow(rules, [*prompt, *output[:length]], len(prompt))])
        grown.append(row_of(params, RuledRow(rules, [*prompt, *output], len(prompt))))
    together = sample(logits, SamplingBatch.build(grown))
    for row, (params, prompt, output) in enumerate(rows):
        alone = sample(
            logits[row : row + 1], SamplingBatch.build([row_of(params, ruled(params, prompt, output))])
        )
        assert alone.token_ids[0] == together.token_ids[row]
        assert alone.is_possible[0] == together.is_possible[row]
        assert alone.logprobs[0] == together.logprobs[row]


def test_parameters_that_leave_nothing_are_told_from_logits_that_are_not_finite():
    nothing = SamplingParams(9, allowed_token_ids=(3,), bad_words=((3,),))
    logits = random_logits(3)
    logits[2, 5] = torch.nan
    rows = [SamplingRow(nothing, 0, 0, ruled(nothing, [1], []))] * 3
    rows[0] = SamplingRow(SamplingParams(9), 0, 0)
    drawn = sample(logits, SamplingBatch.build(rows))
    assert drawn.is_finite.tolist() == [True, True, False]
    assert drawn.is_possible.tolist() == [True, False, True]


def test_log_probabilities_are_of_the_model_whatever_the_parameters():
    params = SamplingParams(9, temperature=0.0, allowed_token_ids=(7,), num_logprobs=3)
    logits = random_logits(1)
    drawn = sample(logits, SamplingBatch.build([SamplingRow(params, 0, 0, ruled(params, [1], []))]))
    expected = logits[0].double().log_softmax(-1)
    assert drawn.token_ids.tolist() == [7]
    assert drawn.logprobs[0] == pytest.approx(expected[7].item(), abs=1e-5)
    assert [token for token, _ in drawn.tops[0]] == expected.topk(3).indices.tolist()
    assert [logprob for _, logprob in drawn.tops[0]] == pytest.approx(
        expected.topk(3).values.tolist(), abs=1e-5
    )


def test_likeliest_are_as_many_as_each_row_asks_for():
    logits = random_logits(3)
    tops = likeliest(logits, np.array([2, 0, VOCAB + 5]), norms(logits))
    assert set(tops) == {0, 2}
    assert len(tops[0]) == 2 and len(tops[2]) == VOCAB
    assert tops[0] == likeliest(logits[:1], np.array([2]), norms(logits[:1]))[0]


def test_of_equal_tokens_the_lowest_comes_first():
    logits = torch.zeros(1, 4)
    assert [token for token, _ in likeliest(logits, np.array([4]), norms(logits))[0]] == [0, 1, 2, 3]


def test_only_what_changes_logits_says_so():
    plain = SamplingParams(1, temperature=0.3, top_p=0.5, top_k=3, stop_token_ids=(1,), num_logprobs=5)
    assert not plain.changes_logits
    for values in (
        {"min_p": 0.1},
        {"min_tokens": 1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": ((1, 1.0),)},
        {"allowed_token_ids": (1,)},
        {"bad_words": ((1,),)},
        {"grammar": "x"},
    ):
        assert replace(plain, **values).changes_logits, values


def test_counts_grow_past_their_first_room():
    counts = TokenCounts([5, 5, 7])
    output = [5, *range(300), 7, 7]
    for token in output:
        counts.add(token)
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {
        token: output.count(token) for token in {5, 7, *output}
    }
