"""Time as a dependency, so that schedulers, leases and the simulator run under a virtual clock."""

import asyncio
import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds that never go back; only differences mean anything."""

monotonic: Clock = time.monotonic


def loop_time() -> float:
    """The running event loop's clock: `monotonic`, except on a loop whose time is virtual."""
    return asyncio.get_running_loop().time()


class VirtualClock:
    """A clock that moves only when told. For tests and simulation."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def __call__(self) -> float:
        return self._now_s

    def advance(self, duration_s: float) -> None:
        assert duration_s >= 0, duration_s
        self._now_s += duration_s
