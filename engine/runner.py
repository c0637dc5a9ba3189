"""The torch side of a step: from scheduled work to sampled tokens. Knows nothing of queues or blocks' owners."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

import torch
from torch import Tensor

from core.ids import HandoffId
from engine.batch import BatchEntry, ForwardBatch, build_batch
from engine.cuda_graphs import CudaCapture, DecodeGraphs
from engine.device_sampler import sample_on_device
from engine.kv_pool import KVPool
from engine.logit_rules import LogitRules, RuledRow
from engine.model import LlamaModel
from engine.sampler import SamplingBatch, SamplingRow, sample, score
from engine.scheduler import Sampled, Work
from engine.sequence import Sequence


class ModelRunner:
    """Runs a model over its KV pool. Owns neither."""

    def __init__(self, model: LlamaModel, pool: KVPool, block_size: int, device: str) -> None:
        self._model = model
        self._pool = pool
        self._block_size = block_size
        self._forward: Callable[[ForwardBatch], Tensor] = partial(model.forward, pool=pool)
        self._sample = sample
        if torch.device(device).type == "cuda":
            self._forward = DecodeGraphs(self._forward, torch.device(device), CudaCapture())
            self._sample = sample_on_device

    def run(self, work: Seq[Work]) -> dict[HandoffId, Sampled]:
        """Takes its batch from the host: what runs on a device gets it there in one copy."""
        logits = self._forward(build_batch([_entry(item) for item in work], self._block_size))
        logits = _score_prompts(logits, work)
        sampling = [item.sequence for item in work if item.needs_token]
        if not sampling:
            return {}
        drawn = self._sample(logits, SamplingBatch.build([_row(sequence) for sequence in sampling]))
        is_valid = drawn.is_finite & drawn.is_possible
        return {
            sequence.id: Sampled(
                int(drawn.token_ids[row]),
                float(drawn.logprobs[row]),
                bool(is_valid[row]),
                drawn.tops.get(row, ()),
                bool(drawn.is_possible[row]),
                sequence.guide.error if sequence.guide is not None and not is_valid[row] else None,
            )
            for row, sequence in enumerate(sampling)
        }


def _row(sequence: Sequence) -> SamplingRow:
    ruled = None
    if sequence.params.changes_logits:
        if sequence.rules is None:
            sequence.rules = LogitRules(sequence.params, sequence.guide)
        ruled = RuledRow(sequence.rules, sequence.tokens, sequence.num_prompt_tokens)
    return SamplingRow(sequence.params, sequence.seed, sequence.num_outputs, ruled)


def _entry(work: Work) -> BatchEntry:
    sequence = work.sequence
    start = sequence.num_computed
    tokens = sequence.tokens[start : start + work.num_tokens]
    return BatchEntry(tokens, start, sequence.block_ids, _num_logits(work))


def _num_logits(work: Work) -> int:
    return work.num_tokens if work.sequence.is_scored else int(work.needs_token)


def _score_prompts(logits: Tensor, work: Seq[Work]) -> Tensor:
    """Adds their scores to the sequences that want some; returns the rows [R, vocab] that are left to draw from."""
    if not any(item.sequence.is_scored for item in work):
        return logits
    row, kept = 0, []
    for item in work:
        sequence, end = item.sequence, row + _num_logits(item)
        if sequence.is_scored:
            first = sequence.num_computed + 1
            targets = sequence.tokens[first : first + item.num_tokens]
            own = logits[row : row + len(targets)]
            sequence.scores += score(own, targets, sequence.params.num_prompt_logprobs)
        kept += [end - 1] if item.needs_token else []
        row = end
    return logits[kept]
