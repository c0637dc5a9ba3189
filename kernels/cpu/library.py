"""The compiled library and its C signatures. Knows nothing of tensors.

The library's OpenMP runtime is the one that torch has loaded, so torch.set_num_threads and OMP_NUM_THREADS count
for both, and no second pool of threads spins beside the first.
"""

import logging
import os
from collections.abc import Callable
from ctypes import CDLL, POINTER, Structure, c_float, c_int64, c_void_p
from functools import cache
from typing import Any

import torch

from kernels.cpu.build import CompileError, build, compiler

logger = logging.getLogger(__name__)

SWITCH = "TANDEM_CPU_KERNELS"
"""Environment variable: `torch` turns the native bodies off."""


class RopeShape(Structure):
    """Mirrors the struct of that name in elementwise.cpp."""

    _fields_ = (
        ("num_tokens", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
        ("block_stride", c_int64),
        ("head_stride", c_int64),
    )


class Matrix(Structure):
    """Mirrors the struct of that name in matrix.h. Whoever makes it keeps the memory that it points to."""

    _fields_ = (
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("N", c_int64),
        ("K", c_int64),
        ("kind", c_int64),
    )


class AttentionShape(Structure):
    """Mirrors `Shape` in attention.cpp."""

    _fields_ = (
        ("num_seqs", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
        ("max_blocks", c_int64),
        ("block_stride", c_int64),
        ("head_stride", c_int64),
        ("scale", c_float),
    )


_P, _N, _F = c_void_p, c_int64, c_float
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "pack": (_P, _P, _N, _N),
    "add_rms_norm": (_P, _P, _P, _P, _N, _N, _F),
    "silu_mul": (_P, _P, _N, _N),
    "rope_and_cache": (_P, _P, _P, _P, _P, _P, _F, _P, _P, _P, POINTER(RopeShape)),
    "attention": (_P, _P, _P, _P, _P, _P, _P, POINTER(AttentionShape)),
}
SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}


@cache
def native() -> CDLL | None:
    """The library, compiled if need be; None, with one log line, when this machine cannot have it."""
    if os.environ.get(SWITCH) == "torch":
        return None
    command = compiler()
    if command is None:
        logger.warning("no C++ compiler: using the slower torch kernels on CPU")
        return None
    try:
        return CDLL(str(build(command)))
    except (CompileError, OSError) as error:
        logger.warning("cannot build the CPU kernels, using the slower torch ones: %s", error)
        return None


@cache
def exported(name: str, signature: tuple[Any, ...], result: Any = None) -> Callable[..., Any]:
    """An exported function with its C signature. Only where native() is not None."""
    library = native()
    assert library is not None, "the native library is not available"
    found = library[name]
    found.argtypes, found.restype = signature, result
    function: Callable[..., Any] = found
    return function


def function(name: str, dtype: torch.dtype) -> Callable[..., None]:
    """The one of that name for an element type."""
    return exported(f"{name}_{SUFFIXES[dtype]}", _SIGNATURES[name])
