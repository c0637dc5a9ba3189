"""The benchmarks' commands against real servers over the tiny model: what they write is whole and labelled."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.compare import verdict
from bench.serve import Run
from bench.summary import Slo, summarize
from tandem.served import served
from tests.bench.test_summary import outcome

SMALL = ["--requests", "6", "--prompt", "40", "--output", "6", "--vocab-size", "250"]
WORKER = "--dtype float32 --num-blocks 128"


def tandem(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tandem.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)


def svgs(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def texts(svg: ElementTree.Element) -> str:
    return " ".join("".join(element.itertext()) for element in svg.iter() if element.tag.endswith("text"))


def assert_a_page(path: Path, *words: str) -> None:
    """It needs nothing from elsewhere, and every plot names its axes with their units."""
    page = path.read_text()
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\((?!#)", page)
    drawn = svgs(page)
    assert drawn
    for svg in drawn:
        told = texts(svg)
        assert re.search(r"millisecond|second|%|MB/s", told), told
    for word in words:
        assert word in page


def test_compare_asks_everybody_the_same_and_says_who_won(tiny_model, tmp_path):
    paths = ["--json", str(tmp_path / "out.json"), "--html", str(tmp_path / "out.html")]
    slo = ["--slo-ttft", "5", "--slo-itl", "1"]
    options = ["--model", str(tiny_model), "--chunks", "32", "--serve-options", WORKER, "--rates", "20,40"]
    done = tandem("bench", "compare", *options, *SMALL, *slo, *paths)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "out.json").read_text())
    assert list(told["systems"]) == ["colocated, chunks of 32", "tandem"]
    for runs in told["systems"].values():
        assert [run["summary"]["num_whole"] for run in runs] == [6, 6]
        assert [run["summary"]["attainment"] for run in runs] == [1.0, 1.0]
    asked = [[run["traffic"] for run in runs] for runs in told["systems"].values()]
    assert asked[0] == asked[1]
    assert "Goodput (DistServe" in done.stdout
    assert_a_page(tmp_path / "out.html", "One process or a tandem?", "Goodput", "requests a second")


async def test_serve_measures_a_running_server(tiny_model, tmp_path):
    async with served([str(tiny_model), *WORKER.split()]) as addresses:
        paths = ["--json", str(tmp_path / "out.json"), "--html", str(tmp_path / "out.html")]
        arguments = ["bench", "serve", "--url", addresses["http"], *SMALL, *paths]
        done = await asyncio.to_thread(tandem, *arguments, "--concurrency", "2", "--slo-e2e", "9")
        assert done.returncode == 0, done.stderr
        (run,) = json.loads((tmp_path / "out.json").read_text())["runs"]
        summary, requests = run["summary"], run["requests"]
        assert (summary["num_asked"], summary["num_whole"], summary["attainment"]) == (6, 6, 1.0)
        assert [request["num_tokens"] for request in requests] == [6] * 6
        for request in requests:
            assert request["first_token_s"] + sum(request["gaps_s"]) <= request["took_s"]
        assert_a_page(tmp_path / "out.html", "2 at a time")
        chat = await asyncio.to_thread(tandem, *arguments, "--endpoint", "chat", "--rates", "50")
        assert chat.returncode == 0, chat.stderr
        (run,) = json.loads((tmp_path / "out.json").read_text())["runs"]
        assert run["summary"]["num_whole"] == 6


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["bench", "serve", "--url", "http://127.0.0.1:9"], 1, "lists no model"),
        (["bench", "serve", "--rates", "1,x"], 2, "rates"),
        (["bench", "serve", "--spread", "3"], 2, "spread"),
        (["bench", "serve", "--trace", "nowhere.csv"], 2, "nowhere.csv"),
        (["bench", "compare", "--chunks", "x"], 2, "chunks"),
        (["tune", "x.toml"], 2, "--slo-ttft"),
        (["simulate", "nowhere.json"], 2, "nowhere.json"),
    ],
)
def test_a_mistake_is_one_line(arguments, status, told):
    done = tandem(*arguments)
    assert (done.returncode, told in done.stderr) == (status, True), done.stderr
    assert "Traceback" not in done.stderr


def run_of(name: str, first_s: float, gap_s: float, rate: float = 2.0) -> Run:
    outcomes = [outcome(first_s, gap_s, gap_s, sent_s=float(index)) for index in range(10)]
    return Run(name, "t", summarize(outcomes, Slo(first_token_s=1.0), rate), outcomes)


def test_the_verdict_says_when_the_tandem_loses():
    lines = "\n".join(
        verdict(
            {"tandem": [run_of("tandem", 0.8, 0.1)], "colocated": [run_of("colocated", 0.4, 0.3)]},
            Slo(first_token_s=1.0),
            0.9,
        )
    )
    assert "The tandem loses by 2.00 to the best other (colocated) on time to first token" in lines
    assert "The tandem wins by 3.00 over the best other (colocated) on gaps" in lines
    assert "No rate that was tried is too much for anybody" in lines


def test_the_verdict_on_goodput_needs_a_rate_that_was_too_much():
    tandem = [run_of("tandem", 0.8, 0.1), run_of("tandem", 1.2, 0.1, 3.0)]
    other = [run_of("other", 0.8, 0.1), run_of("other", 0.8, 0.1, 3.0)]
    lines = "\n".join(verdict({"tandem": tandem, "other": other}, Slo(first_token_s=1.0), 0.9))
    assert "tandem 2.10, other at least 3.00" in lines
    assert "The tandem loses by 1.43 to the best other (other) on goodput" in lines


@pytest.mark.soak
def test_tune_writes_what_serve_takes_and_simulate_reads_a_profile(tiny_model, tmp_path):
    profile, config = tmp_path / "machine.json", tmp_path / "tandem.toml"
    cost = {"body": [[1, 0.002], [512, 0.05]], "head": [[1, 0.0001], [64, 0.001]]}
    cost |= {"prefill_key_s": 1e-9, "decode_key_s": 1e-9}
    engines = {threads: dict.fromkeys(("alone", "helped", "contended"), cost) for threads in ("1", "2")}
    made = {"model": "tiny", "kv_bytes_per_token": 100, "context_len": 2048, "engines": engines}
    profile.write_text(json.dumps(made))
    simulated = tandem("simulate", str(profile), *SMALL, "--rates", "10", "--prefill", "2", "--slo-ttft", "1")
    assert simulated.returncode == 0, simulated.stderr
    assert "Goodput: 10.00" in simulated.stdout
    options = ["--profile", str(profile), "--model", str(tiny_model), "--confirm", "1", "--slo-ttft", "2"]
    done = tandem("tune", str(config), *options, *SMALL, "--serve-options", WORKER)
    assert done.returncode == 0, done.stderr
    assert re.search(r"simulated [\d.]+, measured [\d.]+", config.read_text())
    assert f'model = "{tiny_model}"' in config.read_text()
