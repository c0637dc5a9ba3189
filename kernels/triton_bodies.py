"""Every operation's body for GPU tensors under one name. Importing it imports triton.

The Gumbel choice is torch's: it runs once a step on rows that are few.
"""

from kernels.reference import gumbel_argmax
from kernels.triton_attention import paged_attention
from kernels.triton_elementwise import add_rms_norm, rms_norm, rope_and_cache, silu_mul

__all__ = ["add_rms_norm", "gumbel_argmax", "paged_attention", "rms_norm", "rope_and_cache", "silu_mul"]
