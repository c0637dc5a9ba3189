"""Which workers serve a request. Pure decisions over what is known now: no I/O, no torch; the simulator runs them.

Prefill: the fewest tokens to compute before this prompt is done (its own uncached ones and those queued).
Decode: prefix overlap, room in the batch and free blocks, in that order of weight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from core.block_hash import HASH_BLOCK_TOKENS
from core.ids import Epoch, WorkerId
from core.load import Load
from core.worker import WorkerRecord


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live worker as the gateway sees it. `num_pending_tokens` and `num_pending` count what this gateway sent it
    and its published load may not show yet."""

    record: WorkerRecord
    load: Load
    num_pending_tokens: int = 0
    num_pending: int = 0


Overlap = Mapping[Epoch, int]
"""Leading hash blocks of the prompt that a worker is believed to hold."""


def choose_prefill(candidates: Sequence[Candidate], num_tokens: int, overlap: Overlap) -> WorkerRecord | None:
    """The prefill worker that would finish `num_tokens` first; None when no pool is large enough."""
    fitting = [c for c in candidates if _fits(c.record, num_tokens)]
    if not fitting:
        return None
    return min(fitting, key=lambda c: (_tokens_ahead(c, num_tokens, overlap), c.record.worker_id)).record


def rank_decode(
    candidates: Sequence[Candidate], num_tokens: int, max_len: int, overlap: Overlap
) -> list[WorkerRecord]:
    """Decode workers for a prompt of `num_tokens`, the best first; only those whose pool holds `max_len` tokens, what
    it may become."""
    fitting = [c for c in candidates if _fits(c.record, max_len)]
    return [c.record for c in sorted(fitting, key=lambda c: _decode_cost(c, num_tokens, overlap))]


def _fits(record: WorkerRecord, num_tokens: int) -> bool:
    return record.kv_spec.num_blocks_for(num_tokens) <= record.num_blocks


def _tokens_ahead(candidate: Candidate, num_tokens: int, overlap: Overlap) -> int:
    cached = min(overlap.get(candidate.record.epoch, 0) * HASH_BLOCK_TOKENS, num_tokens)
    return num_tokens - cached + max(candidate.load.num_queued_tokens, candidate.num_pending_tokens)


def _decode_cost(
    candidate: Candidate, num_tokens: int, overlap: Overlap
) -> tuple[bool, float, int, WorkerId]:
    """Full batches and full pools last; then by how full the batch is, less what need not be sent."""
    record, load = candidate.record, candidate.load
    num_sequences = max(load.num_running + load.num_waiting, candidate.num_pending)
    needs_blocks = record.kv_spec.num_blocks_for(num_tokens + 1)
    is_full = num_sequences >= record.max_batch or load.num_free_blocks < needs_blocks
    cached = overlap.get(record.epoch, 0) * HASH_BLOCK_TOKENS / max(num_tokens, 1)
    return is_full, num_sequences / record.max_batch - 0.5 * cached, -load.num_free_blocks, record.worker_id
