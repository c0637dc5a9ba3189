"""For processes that must not outlive their parent. Linux only."""

import ctypes
import signal
import socket

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Run in a child before exec: SIGKILL it when the parent's thread that started it ends, however that happens."""
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port nobody listens on now. Another process may take it before the caller does: be ready to retry."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
