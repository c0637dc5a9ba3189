"""What is asked and when, from traces and made up."""

import json
import math
import random
import statistics
from itertools import pairwise

import pytest

from bench.traffic import Lengths, Planned, Traffic, arrivals, read_trace, synthetic

AZURE = "arrival_s,input_tokens,output_tokens\n1.5,100,10\n3.5,50,20\n2.5,7,1\n"
MOONCAKE = [
    {"timestamp": 2000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 9]},
    {"timestamp": 1000, "input_length": 1100, "output_length": 7, "hash_ids": [0, 2, 8]},
]


def test_an_azure_trace_starts_at_its_first_arrival(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    traffic = read_trace(path)
    assert traffic.requests == (Planned(0.0, 100, 10), Planned(1.0, 7, 1), Planned(2.0, 50, 20))
    assert traffic.rate_per_s == 1.5


def test_a_mooncake_trace_shares_text_where_its_ids_are_equal(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, MOONCAKE)))
    traffic = read_trace(path)
    assert [request.shared for request in traffic.requests] == [(0, 2), (0, 1)]
    one, other = (traffic.prompt(index, seed=3) for index in range(2))
    assert (len(one), len(other)) == (1100, 1100)
    assert one[:512] == other[:512]
    assert one[512:1024] != other[512:1024]
    assert one[1024:] != other[1024:]
    halved = traffic.divided(2)
    assert [len(halved.prompt(index, 3)) for index in range(2)] == [550, 550]
    assert halved.prompt(0, 3)[:256] == halved.prompt(1, 3)[:256]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("t.csv", "arrival_s,input_tokens,output_tokens\n0,1,x\n", "t.csv:2"),
        ("t.csv", "a,b\n0,1\n", "t.csv:2"),
        ("t.jsonl", '{"timestamp": 0}\n', "t.jsonl:1"),
        ("t.jsonl", "nonsense\n", "t.jsonl:1"),
        ("t.csv", "arrival_s,input_tokens,output_tokens\n", "no request"),
        ("t.txt", "", "Mooncake"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path, name, text, told):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=told):
        read_trace(path)


def test_scaling_keeps_the_ratios():
    traffic = Traffic("t", (Planned(0.0, 80, 16), Planned(4.0, 8, 3), Planned(8.0, 1, 1)))
    scaled = traffic.first(2).divided(8).at_rate(4.0)
    assert scaled.requests == (Planned(0.0, 10, 2), Planned(0.5, 1, 1))
    assert scaled.rate_per_s == 4.0
    assert scaled.name == "t, the first 2, lengths / 8, 4 a second"


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_burstiness_that_were_asked_for(burstiness):
    moments = arrivals(20.0, burstiness, random.Random(1))
    taken = [next(moments) for _ in range(20000)]
    gaps = [after - before for before, after in pairwise(taken)]
    mean = statistics.mean(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.05)
    assert (statistics.stdev(gaps) / mean) ** 2 == pytest.approx(1 / burstiness, rel=0.1)


def test_an_infinite_rate_is_all_at_once_and_runs_ask_other_prompts():
    traffic = synthetic(3, math.inf, 1.0, Lengths(10, 5), random.Random(1))
    assert [request.at_s for request in traffic.requests] == [0.0, 0.0, 0.0]
    assert traffic.rate_per_s == math.inf
    again = Traffic(traffic.name, traffic.requests, run=1)
    assert traffic.prompt(0, 7) == traffic.prompt(0, 7) != again.prompt(0, 7)
    assert set(traffic.of_vocabulary(300).prompt(0, 7)) <= set(range(150, 300))


@pytest.mark.parametrize(
    "wrong", [(0, 1.0, 1.0, 0.0), (1, 0.0, 1.0, 0.0), (1, 1.0, 0.0, 0.0), (1, 1.0, 1.0, 1.5)]
)
def test_what_is_no_traffic_is_refused(wrong):
    num_requests, rate, burstiness, spread = wrong
    with pytest.raises(ValueError, match="positive"):
        synthetic(num_requests, rate, burstiness, Lengths(10, 5, spread), random.Random(1))
