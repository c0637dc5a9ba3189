"""For processes that must not outlive their parent. Linux only.

    python -m core.child PARENT_PID CORES COMMAND...

arms the parent-death signal, pins itself to CORES (comma-separated, `-` for all) and becomes COMMAND. A function to
run between fork and exec would do the same, but deadlocks now and then in a parent with threads (gRPC's are).
"""

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
ALL_CORES = "-"


def dying_with_parent(command: Sequence[str], cores: Sequence[int] = ()) -> tuple[str, ...]:
    """`command` wrapped so that SIGKILL ends it when this process (the thread that starts it) ends, however that
    happens; pinned to `cores` if any are given."""
    pinned = ",".join(map(str, cores)) or ALL_CORES
    return (sys.executable, "-m", "core.child", str(os.getpid()), pinned, *command)


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port nobody listens on now. Another process may take it before the caller does: be ready to retry."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def die_with_parent(parent: int) -> None:
    """SIGKILL will end this process when the thread that started it ends. Exits when `parent` has ended already."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:
        sys.exit("the parent has ended already")


def main() -> None:
    parent, cores, *command = sys.argv[1:]
    die_with_parent(int(parent))
    if cores != ALL_CORES:
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
