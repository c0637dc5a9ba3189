"""How Triton runs here. Knows nothing of kernels.

TRITON_INTERPRET=1 must be set before triton is imported: tests on a machine without a GPU run in a process of their
own for that reason.
"""

from typing import Any

import torch
import triton
import triton.language as tl

IS_INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def dot_type(dtype: torch.dtype) -> Any:
    """The type of tl.dot's operands: the tensors' own, but float32 under the interpreter."""
    return tl.float32 if IS_INTERPRETED else _TYPES[dtype]
