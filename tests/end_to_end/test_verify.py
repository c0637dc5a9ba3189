"""`tandem verify` on the real model: six prompts, every connector, one process and transformers."""

import json
import subprocess
import sys

import pytest

from kernels.cpu.library import native


def verify(*options: str) -> dict[str, dict[str, object]]:
    command = [sys.executable, "-m", "tandem.cli", "verify", "--short", "--json", *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=880)
    assert result.returncode == 0, result.stdout + result.stderr
    return {verdict["name"]: verdict for verdict in json.loads(result.stdout.splitlines()[-1])}


@pytest.mark.timeout(900)
def test_the_real_model_gives_the_same_tokens_over_every_connector():
    verdicts = verify()
    assert set(verdicts) == {"transformers", "shm", "tcp", "ucx"}
    assert all(verdict["differing"] == [] for verdict in verdicts.values())
    assert all(verdict["num_tokens"] > 200 for verdict in verdicts.values())


@pytest.mark.timeout(900)
@pytest.mark.skipif(native() is None, reason="without native kernels bfloat16 depends on the batch")
def test_in_bfloat16_with_weights_as_stored_too():
    verdicts = verify("--dtype", "bfloat16", "--connectors", "shm")
    assert verdicts["shm"]["differing"] == []
    assert verdicts["shm"]["num_tokens"] > 200
