"""The header of a GGUF file: metadata and tensor directory. Knows nothing of tensor types or models.

    "GGUF" | version | num_tensors | num_pairs | pairs... | tensor infos... | padding | tensor data

Parsed in one pass: the `gguf` package's own reader makes several numpy objects for each of the 100,000 vocabulary
strings, which takes seconds in every process.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

from core.errors import ModelLoadError

Scalar = int | float | bool | str
Metadata = dict[str, Scalar | list[Scalar]]

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class TensorInfo(NamedTuple):
    """`shape` is row-major (the reverse of what the file says); `offset` is from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


class GGUFHeader(NamedTuple):
    metadata: Metadata
    tensors: list[TensorInfo]


def parse_header(path: Path, data: mmap.mmap) -> GGUFHeader:
    """The header of the mapped file; `path` is for errors. Raises ModelLoadError for a damaged or truncated one."""
    if data[: len(MAGIC)] != MAGIC:
        raise ModelLoadError(f"{path}: not a GGUF file (wrong magic)")
    try:
        return _Cursor(data).parse()
    except (struct.error, UnicodeDecodeError, KeyError, ValueError, OverflowError) as error:
        raise ModelLoadError(f"{path}: damaged or truncated GGUF header: {error}") from error


def read_metadata(path: Path) -> Metadata:
    """The metadata alone. Raises ModelLoadError, and OSError when the file cannot be opened."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return parse_header(path, data).metadata


class _Cursor:
    """A cursor over the header. Raises struct.error past the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = len(MAGIC)

    def parse(self) -> GGUFHeader:
        version = self._scalar("I")
        if version not in SUPPORTED_VERSIONS:
            raise ValueError(f"GGUF version {version} is not supported")
        num_tensors, num_pairs = int(self._scalar("Q")), int(self._scalar("Q"))
        metadata: Metadata = {}
        for _ in range(num_pairs):
            key = self._string()
            metadata[key] = self._value(int(self._scalar("I")))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ValueError(f"general.alignment is {alignment}")
        base = -(-self._at // alignment) * alignment
        return GGUFHeader(metadata, [info._replace(offset=info.offset + base) for info in infos])

    def _scalar(self, code: str) -> int | float | bool:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return value  # type: ignore[no-any-return]

    def _string(self) -> str:
        (length,) = struct.unpack_from("<Q", self._data, self._at)
        start = self._at + 8
        if start + length > len(self._data):
            raise ValueError("a string passes the end of the file")
        self._at = start + length
        return self._data[start : self._at].decode("utf-8", errors="replace")

    def _value(self, type_id: int) -> Scalar | list[Scalar]:
        if type_id != _ARRAY:
            return self._one(type_id)
        item_type, count = int(self._scalar("I")), int(self._scalar("Q"))
        if item_type == _STRING:
            return [self._string() for _ in range(count)]
        code = f"<{count}{_SCALAR_FORMATS[item_type]}"
        values = struct.unpack_from(code, self._data, self._at)
        self._at += struct.calcsize(code)
        return list(values)

    def _one(self, type_id: int) -> Scalar:
        return self._string() if type_id == _STRING else self._scalar(_SCALAR_FORMATS[type_id])

    def _tensor_info(self) -> TensorInfo:
        name = self._string()
        dims = [int(self._scalar("Q")) for _ in range(int(self._scalar("I")))]
        return TensorInfo(name, tuple(reversed(dims)), int(self._scalar("I")), int(self._scalar("Q")))
