"""The content identity of a model's files. Knows nothing of what the bytes mean.

Workers whose fingerprints are equal may exchange KV blocks, so it covers every byte of the weights up to 1 GiB
and, above that, every header and one sixteenth of the rest, spread evenly.
"""

import mmap
from collections.abc import Sequence
from pathlib import Path

import xxhash

WHOLE_BYTES = 1 << 30
SAMPLE_STRIDE = 1 << 20
SAMPLE_BYTES = 1 << 16
HEADER_BYTES = 8 << 20


def fingerprint_files(description: str, paths: Sequence[Path]) -> str:
    """32 hex digits of xxh3-128 over `description` and, in order, each file's size and bytes; names and places of
    the files do not count."""
    state = xxhash.xxh3_128(description.encode())
    total_bytes = sum(path.stat().st_size for path in paths)
    for path in paths:
        state.update(f"|{path.stat().st_size}|".encode())
        _update(state, path, is_whole=total_bytes <= WHOLE_BYTES)
    return str(state.hexdigest())


def _update(state: "xxhash.xxh3_128", path: Path, is_whole: bool) -> None:
    if path.stat().st_size == 0:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if is_whole:
            state.update(data)
            return
        with memoryview(data) as view:
            state.update(view[:HEADER_BYTES])
            for start in range(HEADER_BYTES, len(view), SAMPLE_STRIDE):
                state.update(view[start : start + SAMPLE_BYTES])
            state.update(view[-SAMPLE_BYTES:])
