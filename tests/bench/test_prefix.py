"""What `bench prefix` compares with, and a small run of it."""

import json
import random

from click.testing import CliRunner

from bench.prefix import Bounds, Figures, belady_hits, chains_of, conclusions, infinite_hits
from bench.traffic import Planned, Traffic
from core.ids import BlockHash
from tandem.cli import main


def chains(*words: str) -> list[list[BlockHash]]:
    """A letter is a block: a prompt's chain is its prefixes."""
    return [[BlockHash(word[:end].encode()) for end in range(1, len(word) + 1)] for word in words]


def test_a_cache_of_any_size_finds_every_prefix_that_was_there():
    assert infinite_hits(chains("abc", "abd", "abc", "x")) == 5
    assert infinite_hits(chains("abc", "bc")) == 0


def test_a_cache_that_knows_the_future_keeps_what_comes_again():
    asked = chains("aa", "bb", "aa", "cc", "aa")
    assert belady_hits(asked, 2) == 4
    assert belady_hits(asked, 1) == 2
    assert belady_hits(asked, 100) == infinite_hits(asked) == 4


def test_more_room_never_finds_less():
    rng = random.Random(3)
    asked = chains(*("".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(60)))
    found = [belady_hits(asked, capacity) for capacity in range(1, 80, 6)]
    assert found == sorted(found)
    assert found[-1] == infinite_hits(asked)


def test_the_block_of_the_last_token_is_never_found():
    traffic = Traffic("t", (Planned(0.0, 64, 1, (1, 2)), Planned(0.0, 65, 1, (1, 2))), block_tokens=32)
    first, second = chains_of(traffic, 1)
    assert (len(first), len(second)) == (3, 4)
    assert first == second[:3]


def test_it_says_how_far_from_the_bounds_and_from_turns_it_is():
    figures = {
        "prefix": Figures(0.4, 0.0, 0.1, 0.2, 0),
        "round_robin": Figures(0.2, 0.0, 0.4, 0.5, 0),
    }
    lines = conclusions(Bounds(100, 0.41, 50, 0.42), figures)
    assert "41.0%: 1.0 points" in lines[0]
    assert "0.95 of that" in lines[1]
    assert "2.00 of the hits, 0.25 of the time" in lines[2]


def test_a_trace_over_both_routings(tiny_model, tmp_path):
    trace, told = tmp_path / "trace.jsonl", tmp_path / "told.json"
    rows = [
        {"timestamp": 50 * n, "input_length": 700, "output_length": 40, "hash_ids": [0, 1 + n]}
        for n in range(12)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--trace", str(trace), "--divide", "8", "--vocab-size", "256", "--json", str(told)]
    more = ["--prefill", "2", "--decode", "1", "--serve-options", "--dtype float32"]
    result = CliRunner().invoke(main, ["bench", "prefix", "--model", str(tiny_model), *options, *more])
    assert result.exit_code == 0, result.output
    found = json.loads(told.read_text())
    prefix, turns = found["routings"]["prefix"], found["routings"]["round_robin"]
    assert 0 < prefix["hit_rate"] <= found["bounds"]["infinite"] + 1e-9
    assert 0 < turns["hit_rate"] <= found["bounds"]["infinite"] + 1e-9
    assert prefix["num_failed"] == turns["num_failed"] == 0


def test_several_rates_are_a_mistake():
    result = CliRunner().invoke(main, ["bench", "prefix", "--rates", "1,2"])
    assert result.exit_code == 2
    assert "one rate" in result.output


def test_what_is_shared_is_computed_once_and_pulled_elsewhere(tiny_model, tmp_path):
    told = tmp_path / "told.json"
    options = ["--model", str(tiny_model), "--vocab-size", "256", "--requests", "3", "--rounds", "1"]
    more = [
        "--serve-options",
        "--dtype float32 --pull-cost 0",
        "--prefix",
        "400",
        "--long",
        "1500",
        "--json",
        str(told),
    ]
    result = CliRunner().invoke(main, ["bench", "reuse", *options, *more])
    assert result.exit_code == 0, result.output
    found = json.loads(told.read_text())
    assert min(found["shared"][name] for name in ("cold_s", "warm_s", "elsewhere_s")) > 0
    assert found["unique"]["first_token"] > 0
    assert min(found["restarted"].values()) > 0
    assert len(found["conclusions"]) == 4
