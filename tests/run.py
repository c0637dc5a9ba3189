"""`make test`: every test, in two pytest processes at once. Those that start workers, servers or clusters mostly
wait, so two such processes take little longer than one; those that only compute give way to them. Arguments: one
pytest with these."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, NamedTuple

PYTEST = (sys.executable, "-m", "pytest", "-m", "not soak")
END_TO_END = Path("tests/end_to_end")


class Part(NamedTuple):
    """What one pytest runs, and how nice it is to others."""

    paths: tuple[str, ...]
    niceness: int


COMPUTING = Part(("tests/kernels", "tests/engine", "tests/bench", "tests/tokenizer"), 10)
ASIDE = (
    "page",
    "cluster_page",
    "top",
    "exact_metrics",
    "tracing",
    "logs",
    "responses",
    "tools",
    "verify",
)
OTHERS = Part(
    ("tests/kv_transfer", "tests/gateway", *(str(END_TO_END / f"test_{name}.py") for name in ASIDE)), 0
)
BACKGROUND = (COMPUTING, OTHERS)
"""One after the other, beside everything else: as long as that takes."""


def main(arguments: list[str]) -> int:
    """The exit status: 0 when all passed."""
    if arguments:
        return subprocess.call([*PYTEST, *arguments])
    rest = [*PYTEST, *(f"--ignore={path}" for part in BACKGROUND for path in part.paths)]
    with tempfile.TemporaryFile() as output:
        foreground = subprocess.Popen(rest)
        try:
            statuses = [_run(part, output) for part in BACKGROUND]
            statuses.append(foreground.wait())
        finally:
            foreground.kill()
            foreground.wait()
        output.seek(0)
        sys.stdout.write(output.read().decode(errors="replace"))
    return next((status for status in statuses if status), 0)


def _run(part: Part, output: IO[bytes]) -> int:
    """Its end, however it ends."""
    command = [*PYTEST, *part.paths]
    process = subprocess.Popen(
        command, stdout=output, stderr=output, preexec_fn=lambda: os.nice(part.niceness)
    )
    try:
        return process.wait()
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
