"""The states of a handoff and what may follow what. No I/O, no clock: both services and the gateway hold one each.

pending ─► granted ─► receiving ─► sealed ─► decoding ─► finished
   └──────────┴───────────┴──────────┴──────────┴──────► aborted | failed

Each side sees its own part: the decode worker's begins with the grant, the prefill worker's is finished when it is
told that its seal was verified. A prompt that is computed where it is decoded goes from pending to decoding.
"""

from enum import StrEnum


class HandoffState(StrEnum):
    PENDING = "pending"
    GRANTED = "granted"
    RECEIVING = "receiving"
    SEALED = "sealed"
    DECODING = "decoding"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def is_terminal(self) -> bool:
        return self in _TERMINAL


_TERMINAL = frozenset({HandoffState.FINISHED, HandoffState.ABORTED, HandoffState.FAILED})
_NEXT: dict[HandoffState, frozenset[HandoffState]] = {
    HandoffState.PENDING: frozenset({HandoffState.GRANTED, HandoffState.DECODING}),
    HandoffState.GRANTED: frozenset({HandoffState.RECEIVING, HandoffState.SEALED}),
    HandoffState.RECEIVING: frozenset({HandoffState.SEALED}),
    HandoffState.SEALED: frozenset({HandoffState.DECODING, HandoffState.FINISHED}),
    HandoffState.DECODING: frozenset({HandoffState.FINISHED}),
}


def can_follow(state: HandoffState, following: HandoffState) -> bool:
    """Whether the transition is legal. A grant whose prompt is wholly cached is sealed without receiving; any
    live state may end aborted or failed; a terminal state is final."""
    if state.is_terminal:
        return False
    if following in (HandoffState.ABORTED, HandoffState.FAILED):
        return True
    return following in _NEXT[state]


class Handoff:
    """One handoff's state. Owned by whoever tracks it; `advance` asserts that the transition is legal."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = HandoffState.PENDING

    def advance(self, following: HandoffState) -> None:
        assert can_follow(self.state, following), f"{self.state} cannot become {following}"
        self.state = following

    def end(self, following: HandoffState) -> None:
        """`advance` to a terminal state, unless it has ended already: an end may be told more than once."""
        if not self.state.is_terminal:
            self.advance(following)
