"""Servers that a command starts for itself end with it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = """
import asyncio, sys
from pathlib import Path
from tandem import served

CHILD = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1] + '.part', 'w'), flush=True); " \
    "os.rename(sys.argv[1] + '.part', sys.argv[1]); time.sleep(600)"

async def work():
    async def is_ready():
        return Path(sys.argv[1]).exists()

    async with served.child([sys.executable, "-c", CHILD, sys.argv[1]], is_ready, 30.0):
        print("ready", flush=True)
        await asyncio.sleep(600)

served.run(work())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_command_that_is_ended_ends_what_it_started(tmp_path: Path, number: signal.Signals):
    told = tmp_path / "pid"
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(told)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert command.stdout is not None
    assert command.stdout.readline() == b"ready\n"
    child = int(told.read_text())
    os.kill(child, 0)
    command.send_signal(number)
    assert command.wait(30) != 0
    command.stdout.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
