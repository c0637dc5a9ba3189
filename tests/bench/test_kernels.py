"""`tandem bench kernels` on the tiny model: its figures belong together. None is compared with a time."""

import json

import pytest
import torch
from click.testing import CliRunner

from bench.kernels import STEP_BATCHES, TEMPERATURES, Plan, run
from bench.operations import OPERATIONS, SMALL
from core.kv_spec import DType
from engine.config import WeightForm
from kernels.cpu import bodies
from tandem.cli import main

pytestmark = pytest.mark.skipif(not bodies.can_run(torch.empty(0)), reason="no C++ compiler")
SHAPE = {"batch": 32, "context": 256, "prompt": 512}


@pytest.fixture(scope="module")
def told(tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "kernels.json"
    run(Plan(str(tiny_model), DType.FLOAT32, WeightForm.DENSE, **SHAPE), path)
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_operations_measured_one_by_one_add_up_to_about_the_whole(told, name):
    each = told["passes"][name]
    assert each["whole_s"] / 3 < each["sum_s"] < each["whole_s"] * 3
    assert sum(row["time_s"] for row in each["rows"].values()) == pytest.approx(each["sum_s"])
    assert sum(row["share"] for row in each["rows"].values()) == pytest.approx(1)


def test_the_json_has_every_figure(told):
    assert {"arguments", "machine", "limits", "passes", "steps"} == set(told)
    assert told["arguments"] | SHAPE == told["arguments"]
    assert set(told["passes"]) == {"decode", "prefill"}
    for each in told["passes"].values():
        assert set(each["rows"]) == set(OPERATIONS)
        for name, row in each["rows"].items():
            assert set(row) == {"time_s", "share", "num_bytes", "flop", "limit_s", "ratio"}
            assert (row["ratio"] is None) == (name == SMALL)
    assert [(step["batch"], step["temperature"]) for step in told["steps"]] == [
        (batch, heat) for batch in STEP_BATCHES for heat in TEMPERATURES
    ]


def test_work_is_what_the_shapes_say(told):
    rows = told["passes"]["decode"]["rows"]
    layers, batch, context = 2, 32, 256
    assert rows["qkv"]["flop"] == 2 * batch * 64 * 128 * layers
    assert rows["qkv"]["num_bytes"] == 4 * 64 * 128 * layers
    assert rows["attention"]["num_bytes"] == 4 * batch * context * 2 * 2 * 16 * layers
    prompt = told["passes"]["prefill"]["rows"]
    assert prompt["head"]["flop"] == 2 * 64 * 512
    assert prompt["attention"]["flop"] == 4 * 64 * layers * (512 * 513 // 2)


def test_the_parts_of_a_step_are_the_step(told):
    for step in told["steps"]:
        assert sum(step["times"].values()) == pytest.approx(step["whole_s"])
        assert 0 < step["outside_share"] < 1
        assert all(part >= 0 for part in step["times"].values())


def test_limits_are_those_of_the_best(told):
    limits = told["limits"]
    assert limits["flop_per_s"] == max(limits["flop_per_s_by"].values())
    assert limits["read_bytes_per_s"] > 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--dtype", "float16"], "no native pass"),
        (["--context", "2048"], "the model's context is 2048 tokens"),
        (["--batch", "0"], "batch must be positive"),
        (["--model", "/nowhere"], "/nowhere does not exist"),
    ],
)
def test_a_mistake_is_one_line(tiny_model, options, reason):
    result = CliRunner().invoke(main, ["bench", "kernels", "--model", str(tiny_model), *options])
    assert result.exit_code == 2
    assert result.stderr.startswith("tandem: ") and reason in result.stderr
    assert result.stderr.count("\n") == 1
