"""Workers that share a host: how fast each one's step goes depends on what the others do at that moment.

a neighbour computes                  contended
it has just become idle               alone       for JOIN_S: its core is taken for wanted that long
it is idle, and lends its core        helped
"""

from collections.abc import Callable
from enum import Enum

from bench.simulation.events import Timeline

JOIN_S = 0.006
"""From the last use of a core to the first piece that a borrower computes on it (kernels/cpu/crew.cpp)."""
LENT_JOIN_S = 0.002
"""The same for one that was lent."""


class Company(Enum):
    """What a worker's neighbours do."""

    ALONE = 0
    HELPED = 1
    CONTENDED = 2


class Host:
    """The workers of one machine, of which each may `lend` its idle core if they borrow from each other."""

    def __init__(self, timeline: Timeline, borrows: bool) -> None:
        self._timeline = timeline
        self._borrows = borrows
        self._places: list[Place] = []

    def place(self) -> "Place":
        """For one more worker."""
        made = Place(self, is_lending=self._borrows)
        self._places.append(made)
        return made

    def changed(self, place: "Place") -> None:
        """It has begun or ended to compute: everybody else's step goes on at another speed."""
        for other in self._places:
            if other is not place:
                other.on_change()
        if not place.is_busy and self._borrows:
            delay_s = LENT_JOIN_S if place.is_lent else JOIN_S
            self._timeline.after(delay_s, self._lend, place, place.num_changes)

    def _lend(self, place: "Place", num_changes: int) -> None:
        if place.num_changes == num_changes:
            place.is_lending = True
            for other in self._places:
                if other is not place:
                    other.on_change()

    def company(self, place: "Place") -> Company:
        others = [other for other in self._places if other is not place]
        if any(other.is_busy for other in others):
            return Company.CONTENDED
        return Company.HELPED if any(other.is_lending for other in others) else Company.ALONE


class Place:
    """One worker's on its host. `on_change` is told when its company may be another."""

    def __init__(self, host: Host, is_lending: bool) -> None:
        self._host = host
        self.is_busy = False
        self.is_lending = is_lending
        self.is_lent = False
        self.num_changes = 0
        self.on_change: Callable[[], None] = lambda: None

    @property
    def company(self) -> Company:
        return self._host.company(self)

    @property
    def has_busy_neighbour(self) -> bool:
        return self.company is Company.CONTENDED

    def set_busy(self, is_busy: bool, is_lent: bool = False) -> None:
        if is_busy != self.is_busy or is_lent != self.is_lent:
            self.is_busy, self.is_lent, self.is_lending = is_busy, is_lent, False
            self.num_changes += 1
            self._host.changed(self)


class Stretch:
    """One step on a host: a piece of work whose speed changes. `durations_s` by company; `on_end` when it is done."""

    def __init__(
        self, timeline: Timeline, place: Place, durations_s: dict[Company, float], on_end: Callable[[], None]
    ) -> None:
        self._timeline = timeline
        self._place = place
        self._durations_s = durations_s
        self._on_end = on_end
        self._left = 1.0
        self._since_s = timeline.now_s
        self._company = place.company
        self._version = 0
        place.on_change = self._change
        self._aim()

    def _change(self) -> None:
        now_s = self._timeline.now_s
        self._left = max(0.0, self._left - (now_s - self._since_s) / self._durations_s[self._company])
        self._since_s, self._company = now_s, self._place.company
        self._version += 1
        self._aim()

    def _aim(self) -> None:
        self._timeline.after(self._left * self._durations_s[self._company], self._arrive, self._version)

    def _arrive(self, version: int) -> None:
        if version == self._version:
            self._place.on_change = lambda: None
            self._on_end()
