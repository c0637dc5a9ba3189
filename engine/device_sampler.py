"""engine.sampler on a GPU: parameters go there in one copy, results come back in one. Knows nothing of requests."""

import numpy as np
import torch
from torch import Tensor

from engine.sampler import SampledTokens, SamplingBatch
from engine.staging import stage
from kernels import ops
from kernels.layouts import RowChoices


@torch.inference_mode()
def sample_on_device(logits: Tensor, requests: SamplingBatch) -> SampledTokens:
    """As engine.sampler.sample, up to the rounding of exponentials and logarithms. Waits for the device once, at the
    end."""
    assert logits.shape[0] == len(requests), (logits.shape, len(requests))
    arrays = (requests.temperatures, requests.top_ks, requests.top_ps, requests.keys)
    choices = stage([torch.from_numpy(array) for array in arrays], logits.device)
    tokens, logprobs, is_valid = ops.sample_packed(logits.contiguous(), RowChoices(*choices)).cpu().numpy()
    return SampledTokens(tokens.astype(np.int64), logprobs.view(np.float32), is_valid.astype(np.bool_))
