"""Reading a GGUF file: tensor directory and dequantised tensors. Knows nothing of models, imports no torch.

The header is parsed by `core.gguf_header`; the `gguf` package's quantisation tables and bodies are used.
"""

import math
import mmap
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import QuantError, dequantize

from core.errors import ModelLoadError
from core.gguf_header import Metadata, TensorInfo, parse_header


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
            if not file.read(1):
                raise ModelLoadError(f"{path}: not a GGUF file (empty, wrong magic)")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            header = parse_header(path, self._map)
            self.metadata: Metadata = header.metadata
            self.tensors = _with_sizes(path, header.tensors)
        except ModelLoadError:
            self._map.close()
            raise
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

    def raw(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """The tensor's bytes as they are stored, a row each of its first dimension. The array owns its memory."""
        stored = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset)
        return stored.reshape(tensor.shape[0], -1).copy()

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


def _with_sizes(path: Path, infos: list[TensorInfo]) -> dict[str, GGUFTensor]:
    """Every tensor by its name, with its size in bytes. Raises ModelLoadError naming the one that makes no sense."""
    tensors: dict[str, GGUFTensor] = {}
    for info in infos:
        try:
            block_values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(info.type_id)]
        except (KeyError, ValueError) as error:
            raise ModelLoadError(f"{path}: damaged: tensor {info.name}: type {info.type_id}") from error
        if not info.shape or info.shape[-1] % block_values != 0:
            raise ModelLoadError(
                f"{path}: damaged: tensor {info.name}: shape {info.shape} does not fit blocks of {block_values}"
            )
        if info.name in tensors:
            raise ModelLoadError(f"{path}: damaged: two tensors have the name {info.name}")
        num_bytes = math.prod(info.shape) // block_values * block_bytes
        tensors[info.name] = GGUFTensor(*info, num_bytes)
    return tensors
