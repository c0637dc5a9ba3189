"""The torch side of a step: from scheduled work to sampled tokens. Knows nothing of queues or blocks' owners."""

from collections.abc import Sequence as Seq

from core.ids import HandoffId
from engine.batch import BatchEntry, build_batch
from engine.kv_pool import KVPool
from engine.model import LlamaModel
from engine.sampler import SamplingBatch, sample
from engine.scheduler import Sampled, Work


class ModelRunner:
    """Runs a model over its KV pool. Owns neither."""

    def __init__(self, model: LlamaModel, pool: KVPool, block_size: int, device: str) -> None:
        self._model = model
        self._pool = pool
        self._block_size = block_size
        self._device = device

    def run(self, work: Seq[Work]) -> dict[HandoffId, Sampled]:
        batch = build_batch([_entry(item) for item in work], self._block_size, self._device)
        logits = self._model.forward(batch, self._pool)
        sampling = [item.sequence for item in work if item.needs_token]
        if not sampling:
            return {}
        requests = SamplingBatch.build([(s.params, s.seed, s.num_outputs) for s in sampling])
        drawn = sample(logits, requests)
        return {
            sequence.id: Sampled(
                int(drawn.token_ids[row]), float(drawn.logprobs[row]), bool(drawn.is_valid[row])
            )
            for row, sequence in enumerate(sampling)
        }


def _entry(work: Work) -> BatchEntry:
    sequence = work.sequence
    start = sequence.num_computed
    tokens = sequence.tokens[start : start + work.num_tokens]
    return BatchEntry(tokens, start, sequence.block_ids, work.needs_token)
