"""`tandem bench latency` on the tiny model: its figures belong together. None is compared with a time."""

import json

import pytest
from click.testing import CliRunner

from bench.latency import Repeat
from tandem.cli import main

SHAPE = {"batch": 3, "prompt": 40, "output": 6, "repeats": 4}


def invoke(*arguments):
    return CliRunner().invoke(main, ["bench", "latency", "--dtype", "float32", *map(str, arguments)])


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory):
    """What was printed, the JSON and the page."""
    folder = tmp_path_factory.mktemp("latency")
    shape = [word for name, value in SHAPE.items() for word in (f"--{name}", value)]
    paths = ["--json", folder / "a.json", "--html", folder / "a.html"]
    result = invoke("--model", tiny_model, *shape, *paths)
    assert result.exit_code == 0, result.output
    return result.output, json.loads((folder / "a.json").read_text()), (folder / "a.html").read_text()


def test_a_batch_is_its_first_tokens_and_those_after_them(run):
    _, told, _ = run
    assert len(told["repeats"]) == SHAPE["repeats"]
    for repeat in told["repeats"]:
        assert len(repeat["gaps_s"]) == SHAPE["output"] - 1
        assert repeat["per_token_s"] == pytest.approx(sum(repeat["gaps_s"]) / len(repeat["gaps_s"]))
        # all prompts fit one step, so the batch goes on together
        assert repeat["first_token_s"] + sum(repeat["gaps_s"]) == pytest.approx(repeat["whole_s"], abs=1e-3)


def test_quantiles_are_those_of_the_repeats(run):
    _, told, _ = run
    assert set(told) == {"plan", "machine", "latencies", "repeats"}
    assert {**told["plan"], **SHAPE} == told["plan"]
    for name, latency in told["latencies"].items():
        values = [repeat[f"{name}_s"] for repeat in told["repeats"]]
        assert latency["mean"] == pytest.approx(sum(values) / len(values))
        assert latency["max"] == max(values)
        assert min(values) <= latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["max"]


def test_table_and_page_say_the_same(run):
    output, told, page = run
    for latency in told["latencies"].values():
        assert f"{latency['mean'] * 1e3:.2f}" in output
        assert f"{latency['p99'] * 1e3:.2f}" in page
    assert "<svg" in page


def test_sequences_of_a_batch_may_start_one_after_the_other():
    repeat = Repeat.of(10.0, [[11.0, 12.0, 13.0], [12.0, 13.0, 15.0]])
    assert (repeat.first_token_s, repeat.whole_s) == (2.0, 5.0)
    assert repeat.gaps_s == (1.0, 1.5)
    assert repeat.per_token_s == 1.25


def test_one_token_has_no_gap(tiny_model, tmp_path):
    paths = ["--json", tmp_path / "a.json", "--html", tmp_path / "a.html"]
    result = invoke("--model", tiny_model, "--output", 1, "--prompt", 8, "--repeats", 1, *paths)
    assert result.exit_code == 0, result.output
    assert "each token after it" not in result.output
    assert json.loads((tmp_path / "a.json").read_text())["latencies"]["per_token"]["mean"] == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--batch", "0"], "--batch must be positive, got 0"),
        (["--prompt", "-1"], "--prompt must be positive, got -1"),
        (["--output", "0"], "--output must be positive, got 0"),
        (["--repeats", "0"], "--repeats must be positive, got 0"),
        (["--threads", "0"], "--threads must be positive, got 0"),
        (["--prompt", "2048"], "--prompt and --output are 2112 tokens, the model's context is 2048"),
        (["--model", "/nowhere"], "/nowhere does not exist"),
    ],
)
def test_a_mistake_is_one_line(tiny_model, options, reason):
    result = invoke("--model", tiny_model, *options)
    assert result.exit_code == 2
    assert result.stderr.startswith("tandem: ") and reason in result.stderr
    assert result.stderr.count("\n") == 1
