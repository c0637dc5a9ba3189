"""The process that reads large bodies, one after the other. Knows no requests.

python -m gateway.front.body_child

in   [ u32 length | msgpack: Task ] ...      out  [ u32 length | msgpack: (field, message, result) ] ...
"""

import signal
import struct
import sys
from typing import Any, BinaryIO

import msgspec

from core.errors import InvalidRequest
from gateway.front.readers import READERS

HEADER = struct.Struct("<I")


class Task(msgspec.Struct, array_like=True):
    """`reader` names one of READERS."""

    reader: str
    options: dict[str, str | bool]
    raw: bytes


def outcome(task: Task) -> tuple[str | None, str, Any]:
    """Either the field at fault and why, or None, nothing and the result."""
    try:
        return None, "", READERS[task.reader].read(task.raw, **task.options)
    except InvalidRequest as error:
        return error.field, str(error), None


def frame(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(len(body)) + body


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    while header := source.read(HEADER.size):
        task = msgspec.msgpack.decode(source.read(HEADER.unpack(header)[0]), type=Task)
        sink.write(frame(outcome(task)))
        sink.flush()


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(sys.stdin.buffer, sys.stdout.buffer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
