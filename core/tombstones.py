"""Ids that are over and must not come back to life. No I/O; takes a clock."""

from collections import OrderedDict
from collections.abc import Hashable

from core.clock import Clock, loop_time


class Tombstones:
    """Remembers each id for `lifetime_s`, at least as long as the longest deadline of what it guards against, and
    never more than `max_entries` of them (the oldest go first)."""

    def __init__(self, lifetime_s: float, max_entries: int = 100_000, clock: Clock = loop_time) -> None:
        self._lifetime_s = lifetime_s
        self._max_entries = max_entries
        self._clock = clock
        self._expires_s: OrderedDict[Hashable, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._expires_s)

    def __contains__(self, key: Hashable) -> bool:
        self._expire()
        return key in self._expires_s

    def add(self, key: Hashable) -> None:
        self._expires_s[key] = self._clock() + self._lifetime_s
        self._expires_s.move_to_end(key)
        if len(self._expires_s) > self._max_entries:
            self._expires_s.popitem(last=False)
        self._expire()

    def _expire(self) -> None:
        now_s = self._clock()
        while self._expires_s and next(iter(self._expires_s.values())) <= now_s:
            self._expires_s.popitem(last=False)
