"""Every operation's body for GPU tensors under one name. Importing it imports triton.

The Gumbel choice is torch's: an engine on a GPU draws with kernels.triton_sampling instead.
"""

from kernels.reference import gumbel_argmax
from kernels.triton_attention import paged_attention
from kernels.triton_elementwise import add_rms_norm, rms_norm, rope_and_cache, silu_mul

__all__ = ["add_rms_norm", "gumbel_argmax", "paged_attention", "rms_norm", "rope_and_cache", "silu_mul"]
