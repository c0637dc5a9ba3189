"""Rotary position tables. Knows nothing of kernels.

Frequencies as in https://arxiv.org/abs/2104.09864; `llama3` scaling keeps high frequencies, divides low ones by the
factor and blends those between, by wavelength against the original context.
"""

import math

import torch
from torch import Tensor

from engine.model_shape import ModelConfig, RopeKind, RopeScaling


def inverse_frequencies(config: ModelConfig, stored_factors: Tensor | None = None) -> Tensor:
    """[head_dim / 2] float32. `stored_factors` are a GGUF file's `rope_freqs.weight`."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind is RopeKind.STORED:
        assert stored_factors is not None, "the file's rope factors were not loaded"
        return frequencies / stored_factors.float()
    if scaling.kind is RopeKind.LINEAR:
        return frequencies / scaling.factor
    return _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_context_len / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    is_low = wavelengths > scaling.original_context_len / low
    is_high = wavelengths < scaling.original_context_len / high
    scaled = torch.where(is_low, frequencies / scaling.factor, blended)
    return torch.where(is_high, frequencies, scaled)


def cos_sin_table(config: ModelConfig, stored_factors: Tensor | None = None) -> Tensor:
    """[context_len, head_dim] float32: the cosines of a position's angles, then their sines."""
    positions = torch.arange(config.context_len, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(config, stored_factors))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
