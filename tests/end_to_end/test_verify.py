"""`tandem verify` on the real model: six prompts, every connector, one process and transformers."""

import json
import subprocess
import sys

import pytest


@pytest.mark.timeout(900)
def test_the_real_model_gives_the_same_tokens_over_every_connector():
    command = [sys.executable, "-m", "tandem.cli", "verify", "--short", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=880)
    assert result.returncode == 0, result.stdout + result.stderr
    verdicts = {verdict["name"]: verdict for verdict in json.loads(result.stdout.splitlines()[-1])}
    assert set(verdicts) == {"transformers", "shm", "tcp", "ucx"}
    assert all(verdict["differing"] == [] for verdict in verdicts.values())
    assert all(verdict["num_tokens"] > 200 for verdict in verdicts.values())
