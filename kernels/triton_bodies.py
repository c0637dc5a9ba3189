"""Every operation's body for GPU tensors under one name. Importing it imports triton.

Drawing tokens is torch's: an engine on a GPU samples with kernels.triton_sampling instead.
"""

from kernels.reference import draw_tokens, largest_tokens
from kernels.triton_attention import paged_attention
from kernels.triton_elementwise import add_rms_norm, rms_norm, rope_and_cache, silu_mul

__all__ = [
    "add_rms_norm",
    "draw_tokens",
    "largest_tokens",
    "paged_attention",
    "rms_norm",
    "rope_and_cache",
    "silu_mul",
]
