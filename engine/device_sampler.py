"""engine.sampler on a GPU: parameters go there in one copy, results come back in one. Knows nothing of requests."""

import numpy as np
import torch
from torch import Tensor

from engine.logit_edits import apply_edits
from engine.sampler import SampledTokens, SamplingBatch, likeliest
from engine.staging import stage
from kernels import ops
from kernels.layouts import RowChoices


@torch.inference_mode()
def sample_on_device(logits: Tensor, requests: SamplingBatch) -> SampledTokens:
    """As engine.sampler.sample, up to the rounding of exponentials and logarithms. Waits for the device once, at the
    end, and once more when likeliest tokens are asked for."""
    assert logits.shape[0] == len(requests), (logits.shape, len(requests))
    logits = logits.contiguous()
    packed = _choose(logits, requests.plain)
    is_possible = torch.ones_like(packed[0])
    if requests.edits is not None:
        rows = torch.from_numpy(requests.edited).to(logits.device)
        raw = logits[rows]
        changed = raw.clone()
        apply_edits(changed, requests.edits)
        tokens = _choose(changed, requests.take(requests.edited))[0]
        logprobs = raw.log_softmax(-1).gather(1, tokens[:, None].long())[:, 0]
        packed[0, rows], packed[1, rows] = tokens, logprobs.view(torch.int32)
        is_possible[rows] = (changed.amax(-1) != -torch.inf).int()
    tokens, logprobs, is_finite, is_possible = torch.cat((packed, is_possible[None])).cpu().numpy()
    return SampledTokens(
        tokens.astype(np.int64),
        logprobs.view(np.float32),
        is_finite.astype(np.bool_),
        is_possible.astype(np.bool_) | ~is_finite.astype(np.bool_),
        likeliest(logits, requests.num_tops, logits.double().logsumexp(-1)),
    )


def _choose(logits: Tensor, requests: SamplingBatch) -> Tensor:
    """[3, R] int32, as kernels.ops.sample_packed."""
    return ops.sample_packed(logits, RowChoices(*stage(list(requests.choices), logits.device)))
