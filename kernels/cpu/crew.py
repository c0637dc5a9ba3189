"""The threads that share a native pass's work (crew.h). One crew a process, started once."""

import logging
import os
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from typing import NamedTuple

from kernels.cpu.library import exported, native

logger = logging.getLogger(__name__)
OWN = -1
_is_started = False


def start_crew(num_threads: int, borrowed_cores: Sequence[int] = ()) -> None:
    """`num_threads` on the process's own cores, the caller's among them, and one on each of `borrowed_cores`, which
    works only while nobody else wants that core. Without effect after the first call, or without native bodies."""
    global _is_started
    if _is_started or native() is None:
        return
    _is_started = True
    own = os.sched_getaffinity(0)
    cores = [OWN] * (num_threads - 1) + [core for core in borrowed_cores if core not in own]
    if cores:
        exported("start_crew", (c_void_p, c_int64))((c_int32 * len(cores))(*cores), len(cores))
        logger.info("%d threads, %d more on borrowed cores", num_threads, len(cores) - num_threads + 1)


class CrewCounts(NamedTuple):
    """Since the start: pieces of work that helpers did, and how often one had to be fetched from a borrowed core that
    it had lost in the middle of a piece."""

    helped: int
    fetched: int


def counts() -> CrewCounts:
    """Only where native() is not None."""
    values = (c_int64 * 2)()
    exported("crew_counts", (c_void_p,))(values)
    return CrewCounts(*values)


def are_others_at_work() -> bool:
    """Whether another worker of this user on this host computes now, on cores that are not this process's."""
    return native() is not None and bool(exported("crew_others_at_work", (), c_int32)())


def lend_core() -> None:
    """Let others borrow the caller's core at once: it does nothing for a while."""
    if native() is not None:
        exported("crew_lend_core", ())()
