"""What `tandem serve` will run."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.layout import ServePlan, plan_gateway, plan_workers, split_cores

PLAN = ServePlan(
    model="m.gguf",
    model_id=None,
    num_prefill=1,
    num_decode=2,
    num_colocated=0,
    connector="shm",
    http="127.0.0.1:0",
    grpc="127.0.0.1:0",
    redis_url="redis://x",
    device="cuda",
    dtype="float32",
    weights="stored",
    num_blocks=None,
    block_size=16,
    max_batch=8,
    token_budget=256,
    max_queue_s=10.0,
    max_local_tokens=0,
    pace=0.0,
    can_borrow=True,
)


@given(
    cores=st.lists(st.integers(0, 200), unique=True, min_size=1, max_size=32), num_workers=st.integers(1, 40)
)
def test_each_worker_has_a_core_and_none_is_shared_while_there_are_enough(cores, num_workers):
    shares = split_cores(cores, num_workers)
    assert len(shares) == num_workers
    assert all(shares)
    if num_workers <= len(cores):
        assert [core for share in shares for core in share] == cores
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        assert {core for share in shares for core in share} == set(cores)


def options(command: tuple[str, ...]) -> dict[str, str]:
    words = [word for word in command if word.startswith("--")]
    return {word: command[command.index(word) + 1] for word in words}


def test_workers_are_named_pinned_and_told_everything():
    workers = plan_workers(PLAN, range(6))
    assert [worker.name for worker in workers] == ["prefill-0", "decode-0", "decode-1"]
    assert [worker.cores for worker in workers] == [(0, 1), (2, 3), (4, 5)]
    told = options(workers[1].command)
    assert told["--id"] == "decode-0"
    assert told["--threads"] == "2"
    assert (told["--connector"], told["--redis-url"], told["--dtype"]) == ("shm", "redis://x", "float32")
    assert told["--device"] == "cuda"
    assert told["--borrow"] == "0,1,4,5"
    assert "--num-blocks" not in told
    assert "--model-id" not in told
    assert workers[1].command[3] == "decode"


@pytest.mark.parametrize(("num_blocks", "expected"), [(None, None), (64, "64")])
def test_options_that_were_not_given_are_left_to_the_worker(num_blocks, expected):
    worker = plan_workers(replace(PLAN, num_blocks=num_blocks, model_id="mine"), [0])[0]
    told = options(worker.command)
    assert told.get("--num-blocks") == expected
    assert told["--model-id"] == "mine"


def test_the_gateway_knows_where_to_listen_and_what_to_write():
    gateway = plan_gateway(PLAN, "/tmp/ready", [0, 1])
    told = options(gateway.command)
    assert (told["--http"], told["--grpc"], told["--ready-file"]) == (
        "127.0.0.1:0",
        "127.0.0.1:0",
        "/tmp/ready",
    )
    assert gateway.cores == (0, 1)
    assert "--api-keys" not in gateway.command
    keyed = replace(PLAN, api_keys="keys.txt")
    assert options(plan_gateway(keyed, "/tmp/ready", [0]).command)["--api-keys"] == "keys.txt"
    assert all("--api-keys" not in worker.command for worker in plan_workers(keyed, [0]))


def test_no_borrowing_on_request_nor_where_there_is_nothing_to_borrow():
    for workers in (plan_workers(replace(PLAN, can_borrow=False), range(6)), plan_workers(PLAN, [3])):
        assert all("--borrow" not in worker.command for worker in workers)


def test_colocated_engines_share_the_cores_and_compute_any_prompt():
    plan = replace(PLAN, num_prefill=None, num_decode=None, num_colocated=2)
    workers = plan_workers(plan, range(4))
    assert [worker.name for worker in workers] == ["colocated-0", "colocated-1"]
    assert [worker.cores for worker in workers] == [(0, 1), (2, 3)]
    assert {worker.command[3] for worker in workers} == {"decode"}
    assert int(options(workers[0].command)["--max-local-tokens"]) > 1 << 20


@pytest.mark.parametrize(
    "counts",
    [
        {"num_colocated": 1},
        {"num_colocated": -1, "num_prefill": None, "num_decode": None},
        {"num_prefill": 0},
        {"num_decode": -2},
    ],
)
def test_counts_that_make_no_system_are_refused(counts):
    with pytest.raises(ValueError, match="--colocated"):
        replace(PLAN, **counts)


def test_every_process_logs_and_traces_as_it_is_told_to():
    plan = replace(PLAN, log_format="json", otlp="http://collector:4317")
    children = [*plan_workers(plan, [0, 1, 2]), plan_gateway(plan, "ready.json", [0, 1, 2])]
    for child in children:
        options = dict(itertools.pairwise(child.command))
        assert (options["--log-format"], options["--otlp"]) == ("json", "http://collector:4317"), child.name
    assert all("--otlp" not in child.command for child in plan_workers(PLAN, [0]))
