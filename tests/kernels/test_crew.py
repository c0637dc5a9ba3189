"""Work shared among threads gives the same results, whoever computes what and whoever wants the cores."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.library import native

ROOT = Path(__file__).parents[2]
CORES = sorted(os.sched_getaffinity(0))
pytestmark = [
    pytest.mark.skipif(native() is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(len(CORES) < 2, reason="needs a core to borrow"),
]

CODE = """
import json, os, sys
core, num_threads, borrowed = json.loads(sys.argv[1])
if core is not None:
    os.sched_setaffinity(0, [core])
import torch
torch.set_num_threads(1)
from kernels.cpu import bodies, crew
from kernels.layouts import RowChoices
crew.start_crew(num_threads, borrowed)
generator = torch.Generator().manual_seed(0)
logits = torch.randn(48, 49152, generator=generator) * 3
keys = torch.randint(-(2**62), 2**62, (48,), generator=generator)
temperatures = torch.tensor([0.0, 1.0, 0.7]).repeat(16)
choices = RowChoices(temperatures, torch.zeros_like(keys), torch.ones(48, dtype=torch.float64), keys)
drawn = [bodies.draw_tokens(logits, choices) for _ in range(30)]
assert all(torch.equal(a, b) for other in drawn for a, b in zip(other, drawn[0]))
print(json.dumps([drawn[0].tokens.tolist(), drawn[0].totals.tolist(), crew.counts().helped]))
"""


def draw(core, num_threads, borrowed):
    """Tokens, totals, and how many pieces of work helpers did."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps([core, num_threads, borrowed])],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return json.loads(done.stdout)


@contextlib.contextmanager
def busy(core):
    """A process that wants that core all the time."""
    code = f"import os\nos.sched_setaffinity(0, [{core}])\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as hog:
        assert hog.stdout is not None
        hog.stdout.readline()
        yield
        hog.kill()


@pytest.fixture(scope="module")
def alone():
    return draw(CORES[0], 1, [])


def test_alone_there_is_nobody_to_help(alone):
    assert alone[2] == 0


def test_several_threads_of_its_own(alone):
    tokens, totals, helped = draw(None, len(CORES), [])
    assert [tokens, totals] == alone[:2]
    assert helped > 0


def test_a_borrowed_core_helps(alone):
    tokens, totals, helped = draw(CORES[0], 1, [CORES[1]])
    assert [tokens, totals] == alone[:2]
    assert helped > 0


def test_a_borrowed_core_that_its_owner_wants_holds_nobody_up(alone):
    with busy(CORES[1]):
        tokens, totals, _ = draw(CORES[0], 1, [CORES[1]])
    assert [tokens, totals] == alone[:2]


def test_cores_that_are_its_own_are_not_borrowed(alone):
    assert draw(CORES[0], 1, [CORES[0]]) == alone


WATCH = """
import os, sys, time
os.sched_setaffinity(0, [int(sys.argv[1])])
from kernels.cpu import crew
until_s = time.monotonic() + 60
while not (is_seen := crew.are_others_at_work()) and time.monotonic() < until_s:
    time.sleep(0.001)
crew.lend_core()
print(is_seen)
"""


def test_that_others_compute_is_seen_from_another_core():
    command = [sys.executable, "-c", WATCH, str(CORES[0])]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as watcher:
        while watcher.poll() is None:
            draw(CORES[1], 2, [CORES[0]])
        assert watcher.stdout is not None
        assert watcher.stdout.read() == "True\n"
