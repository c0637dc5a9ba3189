"""What the comparison with vLLM makes of figures, and of a server that does not run here."""

import io
import sys

import pytest
from rich.console import Console

from bench.client import Outcome
from bench.compare_vllm import CONCURRENCIES, TANDEMS, measure, per_token_s, ratios, show
from bench.vllm_environment import vllm_served
from core.errors import Unavailable
from tandem.served import child, served


async def never():
    return False


def figures(value):
    return {"per token, 1 at a time": value, "first token of 256": value * 10}


def test_ratios_are_to_the_fastest_vllm_of_each_row():
    columns = {
        "vLLM bfloat16": {"a": 4.0, "b": 1.0},
        "vLLM float32": {"a": 2.0, "b": 5.0},
        "tandem dense": {"a": 1.0, "b": 2.0},
        "tandem stored": {"a": 3.0, "b": 1.0},
    }
    assert ratios(columns) == {"tandem dense": {"a": 0.5, "b": 2.0}, "tandem stored": {"a": 1.5, "b": 1.0}}


def test_a_token_is_counted_though_several_come_in_a_chunk():
    assert per_token_s([Outcome(gaps_s=[0.3, 0.6])], num_output=10) == pytest.approx(0.1)


def test_without_vllm_it_says_why_and_shows_the_tandems_alone():
    out = io.StringIO()
    columns = {name: figures(0.02) for name in TANDEMS}
    show(columns, ["vLLM bfloat16 does not run on this machine: [SIGILL]"], 0.1, Console(file=out, width=120))
    assert "does not run on this machine: [SIGILL]" in out.getvalue()
    assert "/ vLLM" not in out.getvalue()
    assert "200.0" in out.getvalue()


async def test_a_child_that_dies_of_a_signal_is_told_by_its_name_and_last_words():
    code = "import os, signal, sys; print('last words', flush=True); os.kill(os.getpid(), signal.SIGILL)"
    with pytest.raises(Unavailable, match=r"(?s)ended by SIGILL.*last words"):
        async with child([sys.executable, "-c", code], never, 30):
            pass


async def test_a_child_that_is_not_ready_in_time_is_told_so():
    with pytest.raises(Unavailable, match="not ready in time"):
        async with child([sys.executable, "-c", "import time; time.sleep(60)"], never, 0.5):
            pass


async def test_a_python_without_vllm_is_unavailable_for_its_own_reason(tmp_path):
    with pytest.raises(Unavailable, match=r"(?s)does not start: it exited with status 1.*vllm"):
        async with vllm_served(sys.executable, tmp_path, "m", "bfloat16"):
            pass


async def test_every_figure_is_taken_from_a_tandem(tiny_model):
    async with served([str(tiny_model), "--model-id", "smollm2", "--num-blocks", "512"]) as addresses:
        told = await measure(addresses["http"], 1, 1, prompts=(16, 100), token_ids=range(3, 250))
    rows = [f"per token, {number} at a time" for number in CONCURRENCIES]
    assert list(told) == [*rows, "first token of 16", "first token of 100"]
    assert all(value > 0 for value in told.values())
