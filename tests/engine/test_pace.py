"""Steps that leave time to others."""

from core.clock import VirtualClock
from engine.pace import Pace, unpaced


class Rig:
    def __init__(self) -> None:
        self.clock = VirtualClock(8.0)
        self.is_wanted = True
        self.num_lent = 0
        self.pace = Pace(0.5, self.clock, lambda: self.is_wanted, self.lend)

    def lend(self) -> None:
        self.num_lent += 1


def test_steps_start_apart_and_the_time_between_is_lent_once():
    rig = Rig()
    assert rig.pace.left_s == 0.0
    rig.pace.begin()
    rig.clock.advance(0.25)
    assert rig.pace.left_s == 0.25
    rig.clock.advance(0.125)
    assert rig.pace.left_s == 0.125
    assert rig.num_lent == 1
    rig.clock.advance(0.125)
    assert rig.pace.left_s == 0.0
    rig.pace.begin()
    assert rig.pace.left_s == 0.5
    assert rig.num_lent == 2


def test_nobody_waits_for_nobody():
    rig = Rig()
    rig.is_wanted = False
    rig.pace.begin()
    assert rig.pace.left_s == 0.0
    assert rig.num_lent == 0


def test_a_step_that_took_longer_is_followed_at_once():
    rig = Rig()
    rig.pace.begin()
    rig.clock.advance(0.75)
    assert rig.pace.left_s == 0.0
    assert unpaced().left_s == 0.0
