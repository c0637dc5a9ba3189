"""Every operation's Triton body under one name. Importing it imports triton."""

from kernels.triton_attention import paged_attention
from kernels.triton_elementwise import add_rms_norm, rms_norm, rope_and_cache, silu_mul

__all__ = ["add_rms_norm", "paged_attention", "rms_norm", "rope_and_cache", "silu_mul"]
