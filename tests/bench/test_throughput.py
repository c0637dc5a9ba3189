"""`tandem bench throughput` on the tiny model: its figures belong together. None is compared with a time."""

import json

import pytest
from click.testing import CliRunner

from tandem.cli import main

AZURE = "arrival_s,input_tokens,output_tokens\n0,100,10\n900,50,20\n1800,8,4\n"
SHARED = {"timestamp": 0, "input_length": 1100, "output_length": 4, "hash_ids": [0, 1, 2]}


def invoke(*arguments):
    return CliRunner().invoke(main, ["bench", "throughput", "--dtype", "float32", *map(str, arguments)])


def told_of(path, *arguments):
    result = invoke("--json", path, *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text()), result.output


def test_rates_are_counts_over_the_time(tiny_model, tmp_path):
    page = tmp_path / "a.html"
    shape = ["--requests", 5, "--prompt", 30, "--output", 7]
    told, output = told_of(tmp_path / "a.json", "--model", tiny_model, *shape, "--html", page)
    done, rates = told["done"], told["rates"]
    assert set(told) == {"plan", "machine", "done", "rates"}
    assert (done["num_requests"], done["num_prompt"], done["num_output"]) == (5, 150, 35)
    assert rates["requests_per_s"] * done["took_s"] == pytest.approx(5)
    assert rates["prompt_tokens_per_s"] * done["took_s"] == pytest.approx(150)
    assert rates["output_tokens_per_s"] * done["took_s"] == pytest.approx(35)
    assert rates["total_tokens_per_s"] * done["took_s"] == pytest.approx(185)
    assert f"{rates['total_tokens_per_s']:.1f}" in output
    assert f"{rates['total_tokens_per_s']:.1f}" in page.read_text() and "<svg" in page.read_text()


def test_every_token_of_the_output_has_its_moment(tiny_model, tmp_path):
    shape = ["--requests", 4, "--prompt", 30, "--output", 7, "--spread", 1, "--threads", 1]
    told, _ = told_of(tmp_path / "a.json", "--model", tiny_model, *shape)
    moments = told["done"]["moments_s"]
    assert len(moments) == told["done"]["num_output"]
    assert moments == sorted(moments)
    assert 0 < moments[0] <= moments[-1] <= told["done"]["took_s"]


def test_a_trace_comes_all_at_once_with_its_lengths_divided(tiny_model, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text(AZURE)
    told, _ = told_of(
        tmp_path / "a.json", "--model", tiny_model, "--trace", trace, "--divide", 2, "--requests", 2
    )
    done = told["done"]
    assert (done["num_requests"], done["num_prompt"], done["num_output"]) == (2, 75, 15)
    assert done["took_s"] < 450, "it did not wait for arrivals"


def test_text_that_a_trace_shares_is_found_and_counted(tiny_model, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join([json.dumps(SHARED)] * 2))
    told, output = told_of(tmp_path / "a.json", "--model", tiny_model, "--trace", trace)
    assert told["done"]["num_cached"] == 1024
    assert "1024 of the prompts' tokens were cached" in output


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--requests", "0"], "--requests must be positive, got 0"),
        (["--prompt", "0"], "--prompt must be positive, got 0"),
        (["--output", "-2"], "--output must be positive, got -2"),
        (["--divide", "0"], "--divide must be positive, got 0"),
        (["--threads", "0"], "--threads must be positive, got 0"),
        (["--spread", "2"], "--spread must be between 0 and 1, got 2"),
        (
            ["--prompt", "2048"],
            "--prompt and --output: a request has 2112 tokens, the model's context is 2048",
        ),
        (["--model", "/nowhere"], "/nowhere does not exist"),
    ],
)
def test_a_mistake_is_one_line(tiny_model, options, reason):
    result = invoke("--model", tiny_model, *options)
    assert result.exit_code == 2
    assert result.stderr.startswith("tandem: ") and reason in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("t.txt", "", "a trace is .csv"),
        ("t.csv", "a,b\n0,1\n", "t.csv:2"),
        ("t.csv", "arrival_s,input_tokens,output_tokens\n0,5000,1\n", "--divide makes it shorter"),
    ],
)
def test_a_trace_that_does_not_do_is_named(tiny_model, tmp_path, name, text, reason):
    path = tmp_path / name
    path.write_text(text)
    result = invoke("--model", tiny_model, "--trace", path)
    assert result.exit_code == 2
    assert result.stderr.startswith("tandem: --trace") and reason in result.stderr
    assert result.stderr.count("\n") == 1
