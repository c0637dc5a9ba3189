"""Virtual environments for software that is measured or tried beside a tandem, never in a tandem's own."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from core.errors import Unavailable

INSTALL_TIMEOUT_S = 1200.0
DONE = ".ready"


@dataclass(frozen=True, slots=True)
class Environment:
    """`requirements` as pip reads them; wheels only, but for `from_source`, which publish none. `unused` are taken
    out again: dependencies that nothing needs here, and that do not load."""

    requirements: tuple[str, ...]
    from_source: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


def install(directory: Path, environment: Environment) -> Path:
    """Its Python, installed below `directory` unless it already is. Raises Unavailable."""
    python, done = directory / "bin/python", directory / DONE
    if done.exists() and done.read_text(encoding="utf-8") == repr(environment):
        return python
    try:
        _run(sys.executable, "-m", "venv", "--clear", str(directory))
        _run(
            str(python),
            "-m",
            "pip",
            "install",
            *_wheels_but(environment.from_source),
            *environment.requirements,
        )
        if environment.unused:
            _run(str(python), "-m", "pip", "uninstall", "--yes", *environment.unused)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise Unavailable(f"it cannot be installed: {said.strip()[-1000:]}") from error
    done.write_text(repr(environment), encoding="utf-8")
    return python


def _wheels_but(from_source: Sequence[str]) -> list[str]:
    return ["--only-binary=:all:", *(f"--no-binary={name}" for name in from_source)]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
