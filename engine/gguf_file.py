"""Reading a GGUF file: metadata, tensor directory and dequantised tensors. Knows nothing of models, imports no torch.

    "GGUF" | version | num_tensors | num_pairs | pairs... | tensor infos... | padding | tensor data

The header is parsed here in one pass: the `gguf` package's own reader makes several numpy objects for each of the
100,000 vocabulary strings, which takes seconds in every process. Its quantisation tables and bodies are used.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import QuantError, dequantize

from engine.model_errors import ModelLoadError

Scalar = int | float | bool | str
Metadata = dict[str, Scalar | list[Scalar]]

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class GGUFTensor(NamedTuple):
    """`shape` is row-major (the reverse of what the file says); `offset` is from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    num_bytes: int


class GGUFFile:
    """An open file, mapped for reading. Raises ModelLoadError for anything that is not a whole, readable GGUF."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise ModelLoadError(f"{path}: not a GGUF file (wrong magic)")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            header = _Header(self._map)
            self.metadata, self.tensors = header.parse()
        except (struct.error, UnicodeDecodeError, KeyError, ValueError, OverflowError) as error:
            self._map.close()
            raise ModelLoadError(f"{path}: damaged or truncated GGUF header: {error}") from error
        self._check_extents()

    def _check_extents(self) -> None:
        size = len(self._map)
        for tensor in self.tensors.values():
            if tensor.offset + tensor.num_bytes > size:
                self._map.close()
                raise ModelLoadError(
                    f"{self.path}: truncated: tensor {tensor.name} ends at byte "
                    f"{tensor.offset + tensor.num_bytes} of {size}"
                )

    def read(self, tensor: GGUFTensor) -> npt.NDArray[np.float32]:
        """The tensor's values, dequantised, in its row-major shape. The array owns its memory."""
        kind = GGMLQuantizationType(tensor.type_id)
        raw = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset)
        rows = raw.reshape(*tensor.shape[:-1], -1)
        try:
            values = dequantize(rows, kind)
        except (NotImplementedError, QuantError) as error:
            raise ModelLoadError(
                f"{self.path}: tensor {tensor.name}: cannot read type {kind.name}"
            ) from error
        return np.array(values.reshape(tensor.shape), np.float32)

    def close(self) -> None:
        self._map.close()

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Header:
    """A cursor over the header. Raises struct.error past the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = len(MAGIC)

    def parse(self) -> tuple[Metadata, dict[str, GGUFTensor]]:
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
        tensors = {info.name: info._replace(offset=info.offset + base) for info in infos}
        if len(tensors) != len(infos):
            raise ValueError("two tensors have the same name")
        return metadata, tensors

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

    def _tensor_info(self) -> GGUFTensor:
        name = self._string()
        num_dims = int(self._scalar("I"))
        dims = [int(self._scalar("Q")) for _ in range(num_dims)]
        type_id, offset = int(self._scalar("I")), int(self._scalar("Q"))
        block_values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
        if not dims or dims[0] % block_values != 0:
            raise ValueError(f"tensor {name}: shape {dims} does not fit its type's blocks of {block_values}")
        num_values = 1
        for dim in dims:
            num_values *= dim
        return GGUFTensor(
            name, tuple(reversed(dims)), type_id, offset, num_values // block_values * block_bytes
        )
