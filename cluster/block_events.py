"""A worker's changes to its cache, as entries of the stream `events`: what they look like, written and read.

event   blocks
epoch   decimal
sequence   1, 2, 3, ... within the epoch: a number that is missing says that a change was
stored, removed   hashes, 16 bytes each, one after the other
cleared   1: everything said before is void
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.block_hash import HASH_BYTES
from core.ids import BlockHash, Epoch

KIND = b"blocks"


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """One batch: what is stored or removed now, after everything was cleared if it says so. Orders within it do not
    matter: a hash is in one of the two at most."""

    epoch: Epoch
    sequence: int
    stored: Sequence[BlockHash] = ()
    removed: Sequence[BlockHash] = ()
    is_cleared: bool = False

    def add_to(self, redis: Any, stream: str, max_events: int) -> Any:
        """Append it, over a connection (the result is to be awaited) or to a pipeline."""
        fields: dict[str, str | int | bytes] = {
            "event": KIND,
            "epoch": self.epoch,
            "sequence": self.sequence,
        }
        if self.stored:
            fields["stored"] = b"".join(self.stored)
        if self.removed:
            fields["removed"] = b"".join(self.removed)
        if self.is_cleared:
            fields["cleared"] = 1
        return redis.xadd(stream, fields, maxlen=max_events, approximate=True)


def read_event(fields: Mapping[bytes, bytes]) -> BlockEvent | None:
    """None for an entry of another kind, or one that no worker would write."""
    if fields.get(b"event") != KIND:
        return None
    try:
        return BlockEvent(
            Epoch(int(fields[b"epoch"])),
            int(fields[b"sequence"]),
            _hashes(fields.get(b"stored", b"")),
            _hashes(fields.get(b"removed", b"")),
            b"cleared" in fields,
        )
    except (KeyError, ValueError):
        return None


def _hashes(joined: bytes) -> list[BlockHash]:
    if len(joined) % HASH_BYTES:
        raise ValueError(f"{len(joined)} bytes are not whole hashes")
    return [BlockHash(joined[start : start + HASH_BYTES]) for start in range(0, len(joined), HASH_BYTES)]
