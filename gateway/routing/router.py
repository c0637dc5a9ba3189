"""Which workers serve a request. Pure decisions over what is known now: no I/O, no torch; the simulator runs them.

Prefill: the fewest tokens to compute before this prompt is done (its own uncached ones and those queued).
Decode: prefix overlap, room in the batch and free blocks, in that order of weight.
"""

from collections.abc import Collection, Mapping, Sequence
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


NOBODY: Collection[WorkerId] = frozenset()


def choose_prefill(
    candidates: Sequence[Candidate],
    num_tokens: int,
    overlap: Overlap,
    avoid: Collection[WorkerId] = NOBODY,
) -> WorkerRecord | None:
    """The prefill worker that would finish `num_tokens` first, one of `avoid` only if there is no other; None when no
    pool is large enough."""

    def cost(candidate: Candidate) -> tuple[bool, int, WorkerId]:
        worker_id = candidate.record.worker_id
        return worker_id in avoid, tokens_ahead(candidate, num_tokens, overlap), worker_id

    best = min((c for c in candidates if _fits(c.record, num_tokens)), key=cost, default=None)
    return best.record if best is not None else None


def rank_decode(
    candidates: Sequence[Candidate],
    num_tokens: int,
    max_len: int,
    overlap: Overlap,
    avoid: Collection[WorkerId] = NOBODY,
) -> list[WorkerRecord]:
    """Decode workers for a prompt of `num_tokens`, the best first, those of `avoid` last; only those whose pool holds
    `max_len` tokens, what it may become."""
    fitting = [c for c in candidates if _fits(c.record, max_len)]
    fitting.sort(key=lambda c: (c.record.worker_id in avoid, _decode_cost(c, num_tokens, overlap)))
    return [c.record for c in fitting]


def _fits(record: WorkerRecord, num_tokens: int) -> bool:
    return record.kv_spec.num_blocks_for(num_tokens) <= record.num_blocks


def tokens_ahead(candidate: Candidate, num_tokens: int, overlap: Overlap) -> int:
    """What this worker computes before a prompt of `num_tokens` is done there: its queue and what is not cached."""
    uncached = num_tokens - cached_tokens(candidate.record, num_tokens, overlap)
    return uncached + max(candidate.load.num_queued_tokens, candidate.num_pending_tokens)


def cached_tokens(record: WorkerRecord, num_tokens: int, overlap: Overlap) -> int:
    """Leading tokens of a prompt of `num_tokens` that this worker is believed to hold."""
    return min(overlap.get(record.epoch, 0) * HASH_BLOCK_TOKENS, num_tokens)


def _decode_cost(
    candidate: Candidate, num_tokens: int, overlap: Overlap
) -> tuple[bool, float, int, WorkerId]:
    """Full batches and full pools last; then by how full the batch is, less what need not be sent."""
    record, load = candidate.record, candidate.load
    num_sequences = max(load.num_running + load.num_waiting, candidate.num_pending) - load.num_suspended
    needs_blocks = record.kv_spec.num_blocks_for(num_tokens + 1)
    is_full = num_sequences >= record.max_batch or load.num_free_blocks < needs_blocks
    cached = overlap.get(record.epoch, 0) * HASH_BLOCK_TOKENS / max(num_tokens, 1)
    return is_full, num_sequences / record.max_batch - 0.5 * cached, -load.num_free_blocks, record.worker_id
