"""What outcomes amount to."""

import pytest

from bench.client import Outcome
from bench.summary import Slo, goodput_per_s, quantile, summarize


def outcome(first_s: float, *gaps_s: float, sent_s: float = 0.0, **others: object) -> Outcome:
    whole = {"status": 200, "is_whole": True, "num_prompt": 10, "num_tokens": len(gaps_s) + 1}
    made = Outcome(sent_s=sent_s, first_token_s=first_s, gaps_s=list(gaps_s), took_s=first_s + sum(gaps_s))
    for name, value in {**whole, **others}.items():
        setattr(made, name, value)
    return made


GOOD = outcome(0.5, 0.1, 0.1, 0.1)
LATE = outcome(2.0, 0.1, 0.1, sent_s=1.0)
STALLED = outcome(0.5, 0.01, 0.01, 0.9, sent_s=2.0)
REFUSED = Outcome(status=429, sent_s=3.0, took_s=0.01)
LOST = Outcome(status=0, sent_s=3.0, took_s=1.0, error="gone")
ALL = [GOOD, LATE, STALLED, REFUSED, LOST]


def test_a_request_meets_all_limits_or_none():
    slo = Slo(first_token_s=1.0, per_token_s=0.2)
    assert [slo.is_met(each) for each in ALL] == [True, False, False, False, False]
    assert [Slo(gap_s=0.2).is_met(each) for each in ALL] == [True, True, False, False, False]
    assert [Slo(total_s=1.0).is_met(each) for each in ALL] == [True, False, False, False, False]
    assert [Slo().is_met(each) for each in ALL] == [True, True, True, False, False]
    assert str(slo) == "its first token came within 1 s and its mean gap was at most 0.2 s"


def test_several_tokens_of_one_chunk_make_its_gap_no_longer():
    chunked = outcome(0.5, 0.4, num_tokens=5)
    assert chunked.per_token_s == pytest.approx(0.1)
    assert chunked.worst_gap_s == 0.4


def test_a_summary_counts_everybody_and_measures_those_who_were_answered():
    summary = summarize(ALL, Slo(first_token_s=1.0, per_token_s=0.2))
    assert (summary.num_asked, summary.num_whole, summary.num_refused, summary.num_failed) == (5, 3, 1, 1)
    assert summary.duration_s == pytest.approx(4.0)
    assert summary.attainment == pytest.approx(0.2)
    assert summary.met_per_s == pytest.approx(0.25)
    assert summary.first_token.p50 == 0.5
    assert summary.first_token.max == 2.0
    assert summary.output_tokens_per_s == pytest.approx(11 / 4)
    assert summary.gap.max == summary.worst_gap.max == 0.9


def test_goodput_is_the_last_rate_with_that_attainment_and_a_part_of_the_way_to_the_next():
    assert goodput_per_s([(1.0, 1.0), (2.0, 1.0), (3.0, 0.8)]) == pytest.approx(2.5)
    assert goodput_per_s([(3.0, 0.8), (1.0, 1.0), (2.0, 1.0)]) == pytest.approx(2.5)
    assert goodput_per_s([(1.0, 0.95), (2.0, 0.92)]) == 2.0
    assert goodput_per_s([(2.0, 0.5)]) == pytest.approx(0.4)
    assert goodput_per_s([(1.0, 1.0), (2.0, 0.5), (3.0, 1.0)]) == pytest.approx(1.2), (
        "what is beyond does not count"
    )
    assert goodput_per_s([]) == 0.0


def test_quantiles():
    assert quantile([], 0.5) == 0.0
    assert quantile([3.0], 0.99) == 3.0
    assert quantile([float(value) for value in range(101)], 0.9) == pytest.approx(90.0)
