"""A process that asks for /health every 20 ms until its input ends, and then writes how long each answer took.

    python tests/end_to_end/health_times.py HOST PORT

Knows nothing of ours: it has a processor's attention of its own, and nobody who attacks can hold it up."""

import json
import socket
import sys
import threading
import time

PAUSE_S = 0.02
REQUEST = b"GET /health HTTP/1.1\r\nHost: tandem\r\n\r\n"
ANSWER = b'{"status":"ok"}'


def ask(connection: socket.socket) -> float:
    started_s = time.perf_counter()
    connection.sendall(REQUEST)
    answer = b""
    while not answer.endswith(ANSWER):
        part = connection.recv(1 << 16)
        if not part:
            raise ConnectionError(f"not well: {answer!r}")
        answer += part
    return time.perf_counter() - started_s


def main() -> None:
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    took_s = []
    with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while not ended.wait(max(PAUSE_S - (took_s[-1] if took_s else 0.0), 0.0)):
            took_s.append(ask(connection))
    sys.stdout.write(json.dumps(took_s))


if __name__ == "__main__":
    main()
