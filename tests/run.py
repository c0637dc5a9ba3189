"""`make test`: every test, in two pytest processes at once. Those that start workers, servers or clusters mostly
wait, and those that only compute need one core: together they take little longer than the former alone. Arguments:
one pytest with these."""

import os
import subprocess
import sys
import tempfile

COMPUTING = ("tests/kernels", "tests/engine", "tests/bench", "tests/tokenizer")
PYTEST = (sys.executable, "-m", "pytest", "-m", "not soak")
NICENESS = 10  # of those that nothing waits for


def main(arguments: list[str]) -> int:
    """The exit status: 0 when all passed."""
    if arguments:
        return subprocess.call([*PYTEST, *arguments])
    others = [*PYTEST, *(f"--ignore={folder}" for folder in COMPUTING)]
    with tempfile.TemporaryFile() as output:
        background = subprocess.Popen(
            [*PYTEST, *COMPUTING], stdout=output, stderr=output, preexec_fn=lambda: os.nice(NICENESS)
        )
        try:
            status = subprocess.call(others)
            status = background.wait() or status
        finally:
            background.kill()
            background.wait()
        output.seek(0)
        sys.stdout.write(output.read().decode(errors="replace"))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
