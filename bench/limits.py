"""What one core of this machine can do: reading memory, and multiplying matrices. Knows nothing of models."""

import time
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.library import exported
from kernels.cpu.matrix import PackedMatrix

STREAMS = (4, 8)
MATRIX_ROWS = 256
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True, slots=True)
class Limits:
    """`flop_per_s` is the best of `flop_per_s_by`, which names who reached it."""

    read_bytes_per_s: float
    flop_per_s: float
    flop_per_s_by: dict[str, float]

    def least_s(self, num_bytes: float, flop: float) -> float:
        """What work of this size takes at least: reading and computing overlap."""
        return max(num_bytes / self.read_bytes_per_s, flop / self.flop_per_s)


def best_s(call: Callable[[], object], repeats: int) -> float:
    """The shortest of several runs, after one that counts for nothing."""
    call()
    times = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - started_s)
    return min(times)


def measure(matrices: Sequence[PackedMatrix], repeats: int) -> Limits:
    """`matrices` give the shapes to multiply by, and are multiplied by themselves."""
    rates = matrix_rates(matrices, repeats)
    return Limits(read_rate(repeats), max(rates.values()), rates)


def read_rate(repeats: int) -> float:
    """Bytes a second, streamed from memory by one thread."""
    total = exported("sum_by_streams", (c_void_p, c_int64, c_int64), c_float)
    data = torch.ones(max(1 << 28, 8 * last_cache_bytes()) // 4)
    times = [best_s(partial(total, data.data_ptr(), len(data), streams), repeats) for streams in STREAMS]
    return data.nbytes / min(times)


def last_cache_bytes() -> int:
    """0 where the system does not tell."""
    sizes = [path.read_text(encoding="utf-8").strip() for path in _CACHES.glob("index*/size")]
    return max((int(size.removesuffix("K")) << 10 for size in sizes if size.endswith("K")), default=0)


def matrix_rates(matrices: Sequence[PackedMatrix], repeats: int) -> dict[str, float]:
    """Floating-point operations a second by MATRIX_ROWS rows: for each way to multiply, that of its best shape."""
    rates: dict[str, float] = {}
    for matrix in matrices:
        x = torch.randn(MATRIX_ROWS, matrix.width)
        flop = 2 * MATRIX_ROWS * matrix.num_rows * matrix.width
        for name, call in _ways(matrix, x):
            rates[name] = max(rates.get(name, 0.0), flop / best_s(call, repeats))
    return rates


def _ways(matrix: PackedMatrix, x: Tensor) -> Iterable[tuple[str, Callable[[], object]]]:
    weight = torch.randn(matrix.num_rows, matrix.width)
    narrow, narrow_x = weight.bfloat16(), x.bfloat16()
    yield "torch float32", partial(F.linear, x, weight)
    yield "torch bfloat16", partial(F.linear, narrow_x, narrow)
    for name, dense in (("native float32", PackedMatrix(weight)), ("native bfloat16", PackedMatrix(narrow))):
        yield name, partial(dense.multiply, x)
    yield "native, the model's", partial(matrix.multiply, x)
