"""Cases that a client runs in its own environment, and how they are told: a line of JSON each. Needs only the
standard library, and knows nothing of a tandem."""

import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

MAX_TOLD = 300


@dataclass(frozen=True, slots=True)
class Outcome:
    """`told` is what the case saw, or what went wrong."""

    case: str
    is_right: bool
    told: str


def run(cases: Iterable[Callable[[], Any]]) -> None:
    """Each case, which is named by its docstring, returns what it saw, or raises. Coroutine functions may be among
    them, and share a loop."""
    with asyncio.Runner() as runner:
        for case in cases:
            sys.stdout.write(json.dumps(asdict(_outcome(case, runner))) + "\n")


def _outcome(case: Callable[[], Any], runner: asyncio.Runner) -> Outcome:
    name = (case.__doc__ or case.__name__).strip()
    try:
        told = runner.run(case()) if inspect.iscoroutinefunction(case) else case()
    except Exception as error:  # noqa: BLE001  whatever a client raises is the outcome
        return Outcome(name, False, f"{type(error).__name__}: {error}"[:MAX_TOLD])
    return Outcome(name, True, str(told)[:MAX_TOLD])


def read(lines: str) -> list[Outcome]:
    """What run() wrote; other lines are the client's own and dropped."""
    return [Outcome(**json.loads(line)) for line in lines.splitlines() if line.startswith('{"case"')]


def same(one: object, other: object) -> str:
    """Raises AssertionError when they differ."""
    assert one == other, f"{one!r} is not {other!r}"
    return repr(one)
