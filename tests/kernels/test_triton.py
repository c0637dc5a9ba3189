"""Triton's bodies: run under its interpreter where there is no GPU, and compiled for one without having it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

TIMEOUT_S = 400  # it is one of those that run beside whole clusters
FOLDER = Path(__file__).parent
OPTIONS = ("-q", "-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function")


def run(arguments, **environment):
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment | {"PYTHONPATH": str(FOLDER.parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_bodies_equal_the_reference():
    mode = "0" if torch.cuda.is_available() else "1"
    run(["-m", "pytest", str(FOLDER / "triton_cases.py"), *OPTIONS], TRITON_INTERPRET=mode)


def test_bodies_compile_for_a_gpu(tmp_path):
    run([str(FOLDER / "triton_compiled.py")], TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
