"""Accepting stream connections for a receiver. Knows nothing of what is said on them."""

import asyncio
import logging
import socket
from collections.abc import Callable

logger = logging.getLogger(__name__)
_BACKLOG = 128


class Listener:
    """Hands every accepted socket to `serve`, until closed. Owns the listening socket."""

    def __init__(self, bound: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        bound.setblocking(False)
        bound.listen(_BACKLOG)
        self._socket = bound
        self._serve = serve
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(bound.fileno(), self._accept)

    def close(self) -> None:
        if self._socket.fileno() != -1:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _accept(self) -> None:
        try:
            connected, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # out of descriptors, for instance: the peer will time out and try again
            logger.warning("cannot accept a transfer connection: %s", error)
            return
        self._serve(connected)
