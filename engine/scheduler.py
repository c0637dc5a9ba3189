"""Which tokens the next step computes. No torch, no I/O; takes a clock, so that a simulator runs the same code.

submit ─► waiting ──admit (all blocks of its tokens reserved)──► running ──commit──► finished
             ▲                                                      │
             └───────────────── preempt (blocks released) ──────────┘
"""

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from core.clock import Clock
from core.ids import BlockHash, BlockId, HandoffId
from engine.block_pool import BlockPool
from engine.sequence import FinishReason, Sequence


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`token_budget` tokens and `max_batch` sequences a step; `context_len` tokens a sequence."""

    block_size: int
    token_budget: int
    max_batch: int
    context_len: int


class Work(NamedTuple):
    """`num_tokens` of `sequence` from its num_computed on; a token is sampled when that reaches its end."""

    sequence: Sequence
    num_tokens: int

    @property
    def needs_token(self) -> bool:
        return self.num_tokens == self.sequence.num_to_compute


class Sampled(NamedTuple):
    """What the sampler drew for one sequence; `is_valid` is False when its logits were not finite."""

    token_id: int
    logprob: float
    is_valid: bool


class Progress(NamedTuple):
    """What one step did for one sequence. `token` is None while its prompt is still being computed."""

    sequence: Sequence
    token: Sampled | None
    finish_reason: FinishReason | None


class Scheduler:
    """Continuous batching with chunked prefill, a prefix cache and preemption by recompute."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, clock: Clock) -> None:
        self.limits = limits
        self.pool = pool
        self.clock = clock
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_reserved_places = 0

    @property
    def has_work(self) -> bool:
        return any(sequence.credit > 0 for sequence in (*self.waiting, *self.running))

    @property
    def num_queued_tokens(self) -> int:
        return sum(s.num_to_compute for s in self.waiting) + sum(
            s.num_to_compute for s in self.running if s.num_to_compute > 1
        )

    @property
    def num_free_places(self) -> int:
        return self.limits.max_batch - len(self.running) - self.num_reserved_places

    @property
    def next_waiting(self) -> Sequence | None:
        """Who is admitted next, before anybody behind it."""
        return next((sequence for sequence in self.waiting if sequence.credit > 0), None)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)

    def can_run(self, sequence: Sequence, max_len: int) -> bool:
        """Whether a sequence that may become `max_len` tokens long fits the context, with a token to make, and an
        empty pool. One that does not must not be submitted."""
        num_tokens = len(sequence.tokens)
        is_within_context = 0 < num_tokens < self.limits.context_len
        return is_within_context and self.num_blocks_for(max_len) <= self.pool.num_blocks

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence without blocks. Its tokens must fit an empty pool, and with those that it may still make
        as well: it would be preempted for ever (the caller has refused it otherwise)."""
        assert 0 < self.num_blocks_for(len(sequence.tokens)) <= self.pool.num_blocks, len(sequence.tokens)
        sequence.arrived_s = self.clock()
        sequence.waits_since_s = sequence.arrived_s
        self.waiting.append(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Run a sequence whose blocks the caller owns and whose KV is there (a sealed handoff)."""
        sequence.arrived_s = sequence.waits_since_s = self.clock()
        self.running.append(sequence)

    def schedule(self) -> list[Work]:
        """The next step: sequences that decode first, then chunks of those that do not yet, then new ones (they are
        the last entries, with num_computed equal to num_cached). A sequence without credit is passed over."""
        budget = self.limits.token_budget
        work: list[Work] = []
        for sequence in list(self.running):
            if sequence.num_to_compute == 1 and sequence.credit > 0 and budget and self._make_room(sequence):
                work.append(Work(sequence, 1))
                budget -= 1
        work = [item for item in work if item.sequence in self.running]
        for sequence in self.running:
            if sequence.num_to_compute > 1 and budget:
                work.append(Work(sequence, min(sequence.num_to_compute, budget)))
                budget -= work[-1].num_tokens
        while budget and self.num_free_places > 0 and (head := self.next_waiting) and self._admit(head):
            self.waiting.remove(head)
            self.running.append(head)
            work.append(Work(head, min(head.num_to_compute, budget)))
            budget -= work[-1].num_tokens
        self._end_waits(work)
        return work

    def commit(self, work: Seq[Work], sampled: dict[HandoffId, Sampled]) -> list[Progress]:
        """Account for a computed step. `sampled` is by sequence id. Finished sequences leave the batch, still owning
        their blocks: the caller ends them with finish() or keeps the blocks by detach()."""
        return [self._advance(item, sampled.get(item.sequence.id)) for item in work]

    def finish(self, sequence: Sequence) -> None:
        """Give the blocks back; full ones stay cached. Works in any state and is idempotent."""
        self.pool.release(self.detach(sequence))

    def detach(self, sequence: Sequence) -> list[BlockId]:
        """Take a sequence out; the caller owns its block references afterwards."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        blocks, sequence.block_ids = sequence.block_ids, []
        return blocks

    def register_full_blocks(self, sequence: Sequence, first_token: int = 0) -> None:
        """Make the blocks that are full up to num_computed findable, from the one holding `first_token` on."""
        size = self.limits.block_size
        last = sequence.num_computed // size
        first = first_token // size
        if last > first:
            hashes = sequence.chain(size, last)
            for index in range(first, last):
                self.pool.register(sequence.block_ids[index], hashes[index])

    def full_chain(self, sequence: Sequence, num_tokens: int) -> list[BlockHash]:
        return sequence.chain(self.limits.block_size, num_tokens // self.limits.block_size)

    def _advance(self, item: Work, token: Sampled | None) -> Progress:
        sequence = item.sequence
        computed_before = sequence.num_computed
        needs_token = item.needs_token
        sequence.num_computed += item.num_tokens
        if not needs_token or token is None or not token.is_valid:
            if token is None or token.is_valid:
                self.register_full_blocks(sequence, computed_before)
            return Progress(sequence, token, None)
        self.register_full_blocks(sequence, computed_before)
        sequence.tokens.append(token.token_id)
        sequence.credit -= 1
        reason = sequence.finish_reason(self.limits.context_len)
        return Progress(sequence, token, reason)

    def _end_waits(self, work: Seq[Work]) -> None:
        now_s = self.clock()
        for sequence, _ in work:
            if sequence.waits_since_s is not None:
                sequence.queue_s = now_s - sequence.waits_since_s
                sequence.waits_since_s = None

    def _admit(self, sequence: Sequence) -> bool:
        """Reserve every block of the sequence's tokens, sharing what is cached. False when there is no room."""
        size = self.limits.block_size
        reusable = (len(sequence.tokens) - 1) // size
        shared = self.pool.lookup(sequence.chain(size, reusable))
        self.pool.acquire(shared)
        fresh = self.pool.allocate(self.num_blocks_for(len(sequence.tokens)) - len(shared))
        if fresh is None:
            self.pool.release(shared)
            return False
        sequence.block_ids = [*shared, *fresh]
        sequence.num_computed = sequence.num_cached = len(shared) * size
        return True

    def _make_room(self, sequence: Sequence) -> bool:
        """Give `sequence` the block of its next token, preempting newer sequences while there is none. False when it
        was itself preempted."""
        while sequence in self.running:
            if self.num_blocks_for(len(sequence.tokens)) <= len(sequence.block_ids):
                return True
            fresh = self.pool.allocate(1)
            if fresh is not None:
                sequence.block_ids.extend(fresh)
                return True
            self._preempt(self._victim())
        return False

    def _victim(self) -> Sequence:
        """One whose reader takes nothing, else the newest: a sequence is preempted only for older ones, so they bound
        how often that happens to it."""
        return max(reversed(self.running), key=lambda sequence: (sequence.credit <= 0, sequence.arrived_s))

    def _preempt(self, sequence: Sequence) -> None:
        self.pool.release(self.detach(sequence))
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        sequence.waits_since_s = self.clock()
        self.waiting.appendleft(sequence)
