"""What two connected workers say to each other, and how it is spelled. Knows nothing of sockets, memory or pools.

    sender                                   receiver
    Hello                    ──►
                             ◄──             Welcome, or Refused(0) and the connection ends
    Open(number)             ──►
                             ◄──             Accepted(number) | Refused(number)
    Data(number) [payload]   ──►  ...        one for each run; several transfers interleave
    Trailer(number)          ──►             the seal, last
    Quiet(number)            ──►             instead of it: given up, nothing more is read or written
                             ◄──             Stop(number): please give up and answer Quiet

`number` names a transfer on its connection. Every message fits MAX_MESSAGE_BYTES whatever the size of a grant:
the receiver knows the grant, so Open carries a digest of it, and the digests of a seal's runs travel with the runs.
"""

from dataclasses import replace

import msgspec

from core.errors import TransferFailed
from core.grant import Grant, RunDigest, Seal
from core.ids import Epoch, HandoffId
from kernels.digest import digest
from kv_transfer.base import Identity

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 64 << 10
_MAX_REASON_CHARS = 2000


class Hello(msgspec.Struct, tag=True, array_like=True, frozen=True):
    protocol: int
    identity: Identity


class Welcome(msgspec.Struct, tag=True, array_like=True, frozen=True):
    identity: Identity
    num_blocks: int


class Open(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """`content` is `grant_digest` of the grant as the sender holds it; `mac` is the grant's own."""

    number: int
    handoff_id: HandoffId
    epoch: Epoch
    content: bytes
    mac: bytes


class Accepted(msgspec.Struct, tag=True, array_like=True, frozen=True):
    number: int


class Refused(msgspec.Struct, tag=True, array_like=True, frozen=True):
    number: int
    code: str
    reason: str


class Data(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """One run, adjacent in both pools. Its bytes follow, or are already in place where the sender writes (shm)."""

    number: int
    run: RunDigest


class Trailer(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """`seal` without its runs, which the receiver has; `runs` is `runs_digest` of them."""

    number: int
    seal: Seal
    runs: bytes


class Quiet(msgspec.Struct, tag=True, array_like=True, frozen=True):
    number: int


class Stop(msgspec.Struct, tag=True, array_like=True, frozen=True):
    number: int


Message = Hello | Welcome | Open | Accepted | Refused | Data | Trailer | Quiet | Stop

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    encoded = _encoder.encode(message)
    assert len(encoded) <= MAX_MESSAGE_BYTES, f"{type(message).__name__} of {len(encoded)} bytes"
    return encoded


def decode(encoded: bytes | bytearray | memoryview) -> Message:
    """Raises TransferFailed for anything but a well-formed message."""
    try:
        return _decoder.decode(encoded)
    except msgspec.DecodeError as error:
        raise TransferFailed(f"malformed message: {error}") from error


def refusal(number: int, code: str, reason: str) -> Refused:
    return Refused(number, code, reason[:_MAX_REASON_CHARS])


def grant_digest(grant: Grant) -> bytes:
    """Equal for two workers exactly when they hold the same grant (its mac aside)."""
    return digest(_encoder.encode(replace(grant, mac=b"")))


def runs_digest(runs: tuple[RunDigest, ...]) -> bytes:
    return digest(_encoder.encode(runs))
