"""How soon a step may follow the one before: a worker that others borrow cores from need not run as fast as it can.
Knows nothing of what a step does.

    step ──────┐ lent                              step ──────┐ lent
    0          took           pace_s               pace_s
"""

from collections.abc import Callable

from core.clock import Clock


class Pace:
    """At least `pace_s` from the start of one step to that of the next while `is_wanted()` says that somebody has a
    use for the time between; `lend` is told when it begins."""

    def __init__(
        self, pace_s: float, clock: Clock, is_wanted: Callable[[], bool], lend: Callable[[], None]
    ) -> None:
        self._pace_s = pace_s
        self._clock = clock
        self._is_wanted = is_wanted
        self._lend = lend
        self._next_s = clock()
        self._is_lent = False

    def begin(self) -> None:
        """A step starts now."""
        self._next_s = self._clock() + self._pace_s
        self._is_lent = False

    @property
    def left_s(self) -> float:
        """Until the next step may start; 0 when nobody needs the time."""
        left_s = self._next_s - self._clock()
        if left_s <= 0 or not self._is_wanted():
            return 0.0
        if not self._is_lent:
            self._is_lent = True
            self._lend()
        return left_s


def unpaced() -> Pace:
    """One that never waits."""
    return Pace(0.0, lambda: 0.0, lambda: False, lambda: None)
