"""Other people's clients against a tandem, and what is made of what they tell."""

import json
import subprocess
import sys

import pytest

from bench.clients.cases import Outcome, read, same
from bench.clients.lm_eval_tasks import TOLERANCE, compared

CASES = """
from bench.clients.cases import run
def right():
    'a right one'
    print('what a client says by itself')
    return 7
async def wrong():
    'a wrong one'
    raise ValueError('not so')
run([right, wrong])
"""


def test_cases_are_told_line_by_line_and_read_back():
    said = subprocess.run([sys.executable, "-c", CASES], capture_output=True, text=True, check=True).stdout
    assert "what a client says" in said
    assert read(said) == [
        Outcome("a right one", True, "7"),
        Outcome("a wrong one", False, "ValueError: not so"),
    ]


def test_what_is_not_the_same_is_told_with_both():
    assert same("a", "a") == "'a'"
    with pytest.raises(AssertionError, match="'a' is not 'b'"):
        same("a", "b")


ANSWERS = [[["-1.5", "False"], ["-2.5", "True"]], ["a text"]]


@pytest.mark.parametrize(
    ("acc", "answers", "is_right"),
    [
        (0.5, ANSWERS, True),
        (0.5, [[[str(-1.5 - TOLERANCE / 2), "False"], ["-2.5", "True"]], ["a text"]], True),
        (0.5, [[[str(-1.5 - TOLERANCE * 2), "False"], ["-2.5", "True"]], ["a text"]], False),
        (0.5, [[["-1.5", "True"], ["-2.5", "True"]], ["a text"]], False),
        (0.5, [[["-1.5", "False"], ["-2.5", "True"]], ["another text"]], False),
        (0.5, ANSWERS[:1], False),
        (0.75, ANSWERS, False),
    ],
)
def test_numbers_are_equal_up_to_rounding_and_all_else_exactly(acc, answers, is_right):
    theirs = {"acc": 0.5, "acc_stderr": 0.1}
    outcome = compared("a task", ({"acc": acc, "acc_stderr": 0.2}, answers), (theirs, ANSWERS))
    assert outcome.is_right == is_right, outcome.told


def test_a_task_without_numbers_is_not_right():
    assert not compared("a task", ({}, []), ({}, [])).is_right


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_client_does_what_it_should(tiny_model, tmp_path):
    """Downloads what is not below .bench/ yet."""
    told = tmp_path / "told.json"
    command = [sys.executable, "-m", "bench.clients", "--model", str(tiny_model), "--model-id", "tiny"]
    done = subprocess.run([*command, "--json", str(told)], capture_output=True, text=True)
    outcomes = json.loads(told.read_text()) if told.exists() else {}
    assert set(outcomes) == {"langchain", "litellm", "lm_eval"}, done.stderr[-2000:]
    assert [outcome for own in outcomes.values() for outcome in own if not outcome["is_right"]] == []
    assert done.returncode == 0
