"""KV blocks by their hashes in files of one directory: bounded, checked when read, found again after a restart.

    directory/lock           who holds it owns the directory
    directory/00000007.kv    a segment: [ header | record | record | ... ], only ever appended to
    record                   [ hash 16 | xxh3-128 of hash and bytes 16 | bytes of one block ]

Segments go whole, the one used longest ago first. Nothing is synced: a record that a crash left torn or lost fails
its check and is a miss. No asyncio; calls block and come from any thread.
"""

import fcntl
import logging
import os
import struct
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import xxhash

from core.block_hash import HASH_BYTES
from core.clock import Clock, monotonic
from core.ids import BlockHash
from core.load import DiskCounts

logger = logging.getLogger(__name__)
SEGMENT_BYTES = 32 << 20
RETRY_S = 30.0
"""Nothing is written for so long after an error."""

_MAGIC = b"tandemkv"
_HEADER = struct.Struct("<8s32s")
_DIGEST_BYTES = 16
_PREFIX_BYTES = HASH_BYTES + _DIGEST_BYTES


@dataclass(slots=True)
class Segment:
    """One file, open. `hashes` are in the order of its records, also those that were forgotten since."""

    path: Path
    file: int
    hashes: list[BlockHash] = field(default_factory=list)


class DiskStore:
    """Owns the directory. Whoever writes is told what had to go; whoever reads gets the bytes that were written, or
    nothing."""

    def __init__(
        self,
        directory: Path,
        content: str,
        block_bytes: int,
        max_bytes: int,
        segment_bytes: int = SEGMENT_BYTES,
        clock: Clock = monotonic,
    ) -> None:
        """`content` says what the bytes of a block mean (geometry, weights): segments of another are dropped. Raises
        ValueError for a directory that is another's or cannot be used, or when there is not room for two blocks."""
        self._header = _HEADER.pack(
            _MAGIC, blake2b(f"{content}|{block_bytes}".encode(), digest_size=32).digest()
        )
        self._block_bytes = block_bytes
        self._record_bytes = _PREFIX_BYTES + block_bytes
        room = min(segment_bytes, max_bytes // 2) - _HEADER.size
        self._per_segment = max(1, room // self._record_bytes)
        self._max_segments = max_bytes // (self._per_segment * self._record_bytes + _HEADER.size)
        if self._max_segments < 2:
            raise ValueError(
                f"{directory}: {max_bytes} bytes are not room for two KV blocks of {block_bytes}"
            )
        self._directory = directory
        self._clock = clock
        self._lock = threading.Lock()
        self._segments: OrderedDict[int, Segment] = OrderedDict()
        self._places: dict[BlockHash, tuple[int, int]] = {}
        self._tail: int | None = None
        self._next = 0
        self._silent_until_s = -RETRY_S
        self._owner = _own(directory)
        self.counts = DiskCounts()
        for path in sorted(directory.glob("*.kv")):
            self._open(path)
        if self._segments and len(self._segments[last := max(self._segments)].hashes) < self._per_segment:
            self._tail = last
        self._evict()

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._places

    def hashes(self) -> list[BlockHash]:
        """Everything it holds."""
        with self._lock:
            return list(self._places)

    def put(self, block_hash: BlockHash, data: memoryview) -> list[BlockHash]:
        """Keep a block; what had to go for it. Nothing happens when it is there already, or for a while after the
        disk has refused."""
        with self._lock:
            if block_hash in self._places or self._clock() < self._silent_until_s:
                return []
            try:
                return self._append(block_hash, data)
            except OSError as error:
                self._note_error(error)
                return []

    def get(self, block_hash: BlockHash, into: memoryview) -> bool:
        """Fill `into`, block_bytes long, with what was put. False when it is not there, or not as it was: then `into`
        may hold anything."""
        with self._lock:
            place = self._places.get(block_hash)
            if place is None:
                return False
            number, index = place
            prefix = bytearray(_PREFIX_BYTES)
            try:
                num_read = os.preadv(self._segments[number].file, [prefix, into], self._offset(index))
            except OSError as error:
                self._note_error(error)
                num_read = 0
            if num_read != self._record_bytes or bytes(prefix) != block_hash + _digest(block_hash, into):
                self._forget(block_hash)
                self.counts.num_bad += 1
                return False
            self._segments.move_to_end(number)
            self.counts.num_read += 1
            return True

    def clear(self) -> list[BlockHash]:
        """Forget everything; what it was."""
        with self._lock:
            forgotten = list(self._places)
            try:
                for number in list(self._segments):
                    self._drop(number)
            except OSError as error:
                self._note_error(error)
            return forgotten

    def close(self) -> None:
        """Everything stays where it is, for the next owner."""
        with self._lock:
            for segment in self._segments.values():
                os.close(segment.file)
            self._segments.clear()
            self._places.clear()
            os.close(self._owner)

    def _append(self, block_hash: BlockHash, data: memoryview) -> list[BlockHash]:
        if self._tail is None or len(self._segments[self._tail].hashes) >= self._per_segment:
            self._tail = self._begin()
        segment = self._segments[self._tail]
        index = len(segment.hashes)
        record: list[bytes | memoryview] = [block_hash + _digest(block_hash, data), data]
        if os.pwritev(segment.file, record, self._offset(index)) != self._record_bytes:
            raise OSError(f"{segment.path} took only a part of a block")
        segment.hashes.append(block_hash)
        self._places[block_hash] = (self._tail, index)
        self._segments.move_to_end(self._tail)
        self.counts.num_written += 1
        self._count_held()
        return self._evict()

    def _begin(self) -> int:
        """A new segment, the one that is written from now on."""
        number, self._next = self._next, self._next + 1
        path = self._directory / f"{number:08}.kv"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._segments[number] = Segment(path, file)
        os.pwrite(file, self._header, 0)
        return number

    def _open(self, path: Path) -> None:
        """Take over a segment of an earlier owner; one that is not ours is removed."""
        number = int(path.stem) if path.stem.isdigit() else None
        try:
            if number is None or _read(path, _HEADER.size) != self._header:
                path.unlink()
                return
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            segment = self._segments[number] = Segment(path, file)
            num_records = (os.fstat(file).st_size - _HEADER.size) // self._record_bytes
            for index in range(num_records):
                block_hash = BlockHash(os.pread(file, HASH_BYTES, self._offset(index)))
                segment.hashes.append(block_hash)
                self._places[block_hash] = (number, index)
        except OSError as error:
            self._note_error(error)
        if number is not None:
            self._next = max(self._next, number + 1)
        self._count_held()

    def _evict(self) -> list[BlockHash]:
        gone: list[BlockHash] = []
        while len(self._segments) > self._max_segments:
            gone += self._drop(next(iter(self._segments)))
        self.counts.num_evicted += len(gone)
        return gone

    def _drop(self, number: int) -> list[BlockHash]:
        segment = self._segments.pop(number)
        gone = [h for index, h in enumerate(segment.hashes) if self._places.get(h) == (number, index)]
        for block_hash in gone:
            del self._places[block_hash]
        os.close(segment.file)
        segment.path.unlink(missing_ok=True)
        self._tail = None if self._tail == number else self._tail
        self._count_held()
        return gone

    def _forget(self, block_hash: BlockHash) -> None:
        del self._places[block_hash]
        self._count_held()

    def _count_held(self) -> None:
        self.counts.num_blocks = len(self._places)
        self.counts.num_bytes = sum(
            _HEADER.size + self._record_bytes * len(segment.hashes) for segment in self._segments.values()
        )

    def _offset(self, index: int) -> int:
        return _HEADER.size + index * self._record_bytes

    def _note_error(self, error: OSError) -> None:
        self.counts.num_errors += 1
        self._tail = None
        if self._clock() >= self._silent_until_s:
            logger.warning("the disk cache writes nothing for %g s: %s", RETRY_S, error)
        self._silent_until_s = self._clock() + RETRY_S


def _own(directory: Path) -> int:
    """The open lock of a directory that is made if need be. Raises ValueError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ValueError(f"the disk cache {directory} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ValueError(f"the disk cache {directory} is another worker's") from None
    return lock


def _read(path: Path, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        return file.read(num_bytes)


def _digest(block_hash: BlockHash, data: memoryview) -> bytes:
    """Of both: a record under another's hash fails as well."""
    digest = xxhash.xxh3_128(block_hash)
    digest.update(data)
    return digest.digest()
