"""Servers to be compared, each started when its turn comes and ended after it: none takes time from another."""

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from bench.serve import Target
from tandem.served import served

TANDEM = "tandem"
DIRECTORY = Path(__file__).resolve().parents[1] / ".bench"
UNBOUNDED = ("--max-queue", "600")
"""Nobody is refused: a refusal would look like speed."""


@dataclass(frozen=True, slots=True)
class System:
    """`start()` gives the server for the length of a block. Raises Unavailable when it does not start."""

    name: str
    start: Callable[[], AbstractAsyncContextManager[Target]]


def tandem(model: str, options: Sequence[str] = (), name: str = TANDEM) -> System:
    """`tandem serve` with these options: one prefill and one decode worker unless they say otherwise."""
    return System(name, lambda: _own([model, *UNBOUNDED, *options]))


def colocated(model: str, chunk: int, num_engines: int = 1, options: Sequence[str] = ()) -> System:
    """Engines without tiers that compute at most `chunk` tokens a step."""
    own = [model, *UNBOUNDED, *options, "--colocated", str(num_engines), "--token-budget", str(chunk)]
    return System(f"colocated, chunks of {chunk}", lambda: _own(own))


def vllm(model: str, chunk: int | None, dtype: str = "bfloat16") -> System:
    """vLLM's CPU build over all cores, in an environment that is installed at first use. `chunk` is the most tokens
    of a step; None leaves that to it."""
    name = f"vLLM {dtype}, chunks of {chunk}" if chunk else f"vLLM {dtype}"
    return System(name, lambda: _vllm(model, chunk, dtype))


def at(url: str) -> System:
    """One that runs already."""

    @contextlib.asynccontextmanager
    async def there() -> AsyncIterator[Target]:
        yield Target(url)

    return System(url, there)


@contextlib.asynccontextmanager
async def _own(arguments: Sequence[str]) -> AsyncIterator[Target]:
    async with served(arguments) as addresses:
        yield Target(addresses["http"])


@contextlib.asynccontextmanager
async def _vllm(model: str, chunk: int | None, dtype: str) -> AsyncIterator[Target]:
    from bench.vllm_environment import exported, install, vllm_served

    python, path = install(DIRECTORY / "vllm"), exported(model, DIRECTORY)
    options = ["--max-num-batched-tokens", str(chunk), "--enable-chunked-prefill"] if chunk else []
    async with vllm_served(python, path, "smollm2", dtype, options) as addresses:
        yield Target(addresses["http"])
