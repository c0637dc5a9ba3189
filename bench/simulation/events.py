"""Simulated time: what is to happen, in order. Of two things at the same moment the one that was said first."""

import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[..., None]


class Timeline:
    """A clock that jumps to what happens next."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._waiting: list[tuple[float, int, Action, tuple[Any, ...]]] = []

    def __call__(self) -> float:
        """As a `core.clock.Clock`."""
        return self.now_s

    def at(self, moment_s: float, action: Action, *arguments: Any) -> None:
        assert moment_s >= self.now_s, (moment_s, self.now_s)
        self.num_events += 1
        heapq.heappush(self._waiting, (moment_s, self.num_events, action, arguments))

    def after(self, delay_s: float, action: Action, *arguments: Any) -> None:
        self.at(self.now_s + delay_s, action, *arguments)

    def run(self) -> None:
        """Until nothing more is to happen."""
        waiting, pop = self._waiting, heapq.heappop
        while waiting:
            self.now_s, _, action, arguments = pop(waiting)
            action(*arguments)
