"""Which tokens the next step computes. No torch, no I/O; takes a clock, so that a simulator runs the same code.

submit ─► waiting ──admit (all blocks of its tokens reserved)──► running ──commit──► finished
             ▲                                                      │
             └───────────────── preempt (blocks released) ──────────┘

A sequence whose reader takes tokens is preempted at most MAX_PREEMPTIONS times:

    running, oldest first   [ A  B* C  D* | E  F  G ]      * at the bound
                              shielded      victims, from the right

- Shielded are those at the bound and all that are older. `_has_claim` lets one in among them only if the most that
  they may all become fits the pool together. So when a shielded one finds no block, a victim holds some, or blocks
  are in flight or quarantined: it waits in its place for these, which end without its help.
- The others take blocks of newer ones only and wait in their place when no newer one is left. So the oldest is never
  preempted, and progresses: with everybody newer gone, what it may become fits the pool.
- One at the bound waits outside until those older than it and those inside at the bound leave room for all that it
  may become. Each of these progresses, and nobody who needs such a claim passes it. Others do: they are newer, so
  it takes their blocks later on.
- One without credit is everybody's first victim, shielded or not, also for the sake of one that waits outside, for
  its place as well as for its blocks.
"""

from bisect import insort
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from core.clock import Clock
from core.errors import EngineFailed, InvalidRequest, TandemError
from core.ids import BlockHash, BlockId, HandoffId
from core.sampling import Top
from engine.block_pool import BlockPool
from engine.mask_share import MaskShare
from engine.sequence import FinishReason, Sequence

MAX_PREEMPTIONS = 3
MAX_SCORED = 128
"""Tokens of prompts to be scored in a step: each has logits over the whole vocabulary."""


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


class StepRoom:
    """What is left of a step for chunks of prompts."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._num_scored = MAX_SCORED

    def has_some(self, sequence: Sequence) -> bool:
        return self._num_tokens > 0 and (self._num_scored > 0 or not sequence.is_scored)

    def take(self, sequence: Sequence) -> Work | None:
        """Its next chunk, as large as there is room for."""
        if not self.has_some(sequence):
            return None
        num_tokens = min(sequence.num_to_compute, self._num_tokens)
        if sequence.is_scored:
            num_tokens = min(num_tokens, self._num_scored)
            self._num_scored -= num_tokens
        self._num_tokens -= num_tokens
        return Work(sequence, num_tokens)


class Sampled(NamedTuple):
    """What the sampler drew for one sequence, with the likeliest tokens if it asked for some. Without `is_valid` it
    drew nothing: the logits were not finite, or (not `is_possible`) the request's own parameters left nothing."""

    token_id: int
    logprob: float
    is_valid: bool
    top: Top = ()
    is_possible: bool = True
    guide_error: TandemError | None = None

    @property
    def error(self) -> TandemError:
        """What an invalid one means."""
        if self.guide_error is not None:
            return self.guide_error
        if self.is_possible:
            return EngineFailed("the model produced logits that are not finite")
        return InvalidRequest("body", "the request's own limits leave no token to draw")


class Progress(NamedTuple):
    """What one step did for one sequence. `token` is None while its prompt is still being computed."""

    sequence: Sequence
    token: Sampled | None
    finish_reason: FinishReason | None


class Scheduler:
    """Continuous batching with chunked prefill, a prefix cache and preemption by recompute. `running` is in order of
    arrival, `waiting` in order of priority and then of arrival."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, clock: Clock) -> None:
        self.limits = limits
        self.pool = pool
        self.clock = clock
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_reserved_places = 0
        self.num_preemptions = 0
        self._arrivals = count()
        self._masks = MaskShare(clock)

    @property
    def has_work(self) -> bool:
        return any(sequence.is_able for sequence in (*self.waiting, *self.running))

    @property
    def num_queued_tokens(self) -> int:
        return sum(s.num_to_compute for s in self.waiting) + sum(
            s.num_to_compute for s in self.running if s.num_to_compute > 1
        )

    @property
    def num_free_places(self) -> int:
        return self.limits.max_batch - len(self.running) - self.num_reserved_places

    @property
    def num_suspended(self) -> int:
        """Whose readers take nothing."""
        return sum(sequence.credit <= 0 for sequence in (*self.running, *self.waiting))

    @property
    def next_waiting(self) -> Sequence | None:
        """Who is admitted next, before anybody behind it. One that waits for its claim lets others by, and so does
        one that will find cached what another is about to compute."""
        is_passing = False
        prompts = [sequence for sequence in self.running if sequence.num_to_compute > 1]
        for sequence in (sequence for sequence in self.waiting if sequence.is_able):
            if prompts and self._is_being_computed(sequence, prompts):
                continue
            holders = self._shielded(sequence)
            if sequence not in holders:
                return sequence
            if not is_passing and self._fits(holder for holder in holders if holder.credit > 0):
                return sequence
            is_passing = True
        return None

    @property
    def misguided(self) -> list[tuple[Sequence, TandemError]]:
        """Those that cannot go on by their grammar, and why. The caller ends them."""
        guided = [(s, s.guide.error) for s in (*self.waiting, *self.running) if s.guide is not None]
        return [(sequence, error) for sequence, error in guided if error is not None]

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
        as well: it would wait for ever (the caller has refused it otherwise)."""
        assert 0 < self.num_blocks_for(len(sequence.tokens)) <= self.pool.num_blocks, len(sequence.tokens)
        self._arrive(sequence)
        insort(self.waiting, sequence, key=_turn)

    def make_place(self) -> bool:
        """Have a free place in the batch, at the cost of those whose readers take nothing. False without one."""
        while self.num_free_places <= 0:
            if not self.preempt_idle():
                return False
        return True

    def preempt_idle(self) -> bool:
        """Take place and blocks from the newest whose reader takes nothing. False when there is none."""
        idle = self._newest_idle()
        if idle is not None:
            self._preempt(idle)
        return idle is not None

    def resume(self, sequence: Sequence) -> None:
        """Run a sequence whose blocks the caller owns and whose KV is there (a sealed handoff)."""
        self._arrive(sequence)
        self.running.append(sequence)

    def schedule(self) -> list[Work]:
        """The next step: sequences that decode first, the oldest before others, then chunks of those that do not yet,
        then new ones (they are the last entries, with num_computed equal to num_cached). One that is not able is
        passed over, one whose grammar is slow until it has its turn, and one that must wait for a block."""
        decoding = [s for s in self.running if s.num_to_compute == 1 and s.is_able]
        prompts = [sequence for sequence in self.running if sequence.num_to_compute > 1]
        held = self._masks.held_back(decoding, bool(prompts or self.next_waiting))
        work = self._decode([sequence for sequence in decoding if sequence not in held])
        room = StepRoom(self.limits.token_budget - len(work))
        prompts = [sequence for sequence in self.running if sequence.num_to_compute > 1]
        work += [chunk for sequence in prompts if (chunk := room.take(sequence))]
        while (head := self._next_admitted(room)) is not None:
            self.waiting.remove(head)
            insort(self.running, head, key=_arrival)
            if chunk := room.take(head):
                work.append(chunk)
        work = work or self._decode(held[:1])
        self.end_waits(work)
        return work

    def _decode(self, sequences: Seq[Sequence]) -> list[Work]:
        """A token for each that has, or gets, a block for it; a batch place never is more than the token budget."""
        work: list[Work] = []
        for sequence in sequences:
            if len(work) < self.limits.token_budget and self._make_room(sequence):
                work.append(Work(sequence, 1))
        return work

    def _next_admitted(self, room: "StepRoom") -> Sequence | None:
        """The next waiting sequence, once it has a place and all its blocks. None when it must wait."""
        head = self.next_waiting
        if head is None or not room.has_some(head) or not self.make_place():
            return None
        return head if self._admit(head) else None

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
        if not self.pool.has_prefix_cache:
            return
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

    def end_waits(self, work: Seq[Work]) -> None:
        """These are about to be computed."""
        now_s = self.clock()
        for sequence, _ in work:
            if sequence.waits_since_s is not None:
                sequence.queue_s = now_s - sequence.waits_since_s
                sequence.waits_since_s = None

    def _arrive(self, sequence: Sequence) -> None:
        sequence.arrival = next(self._arrivals)
        sequence.waits_since_s = self.clock()

    def _admit(self, sequence: Sequence) -> bool:
        """Reserve what the sequence needs to run, at the cost of those whose readers take nothing. False when there
        is no room."""
        while not (self._has_claim(sequence) and self._take_blocks(sequence)):
            if not self.preempt_idle():
                return False
        return True

    def _is_being_computed(self, sequence: Sequence, prompts: Iterable[Sequence]) -> bool:
        """Whether the first block that it lacks is one of these running prompts': computed in a step or a few. Each
        of these has its blocks and goes on, so nobody waits for ever."""
        chain = self._reusable(sequence)
        num_known = len(self.pool.lookup(chain))
        if num_known == len(chain):
            return False
        size, lacking = self.limits.block_size, chain[num_known]
        return any(
            prompt.num_computed < (num_known + 1) * size <= len(prompt.tokens)
            and prompt.chain(size, num_known + 1)[-1] == lacking
            for prompt in prompts
        )

    def _reusable(self, sequence: Sequence) -> list[BlockHash]:
        """The blocks that need not be computed when they are cached: the last token always is."""
        if sequence.is_scored or not self.pool.has_prefix_cache:
            return []
        size = self.limits.block_size
        return sequence.chain(size, (len(sequence.tokens) - 1) // size)

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Reserve every block of the sequence's tokens, sharing what is cached. False when there is no room. One that
        was preempted leaves a free block for each running sequence: the next step would preempt it again."""
        size = self.limits.block_size
        shared = self.pool.lookup(self._reusable(sequence))
        num_fresh = self.num_blocks_for(len(sequence.tokens)) - len(shared)
        num_spare = len(self.running) if sequence.num_preemptions else 0
        self.pool.acquire(shared)
        has_room = self.pool.num_available >= num_fresh + num_spare
        fresh = self.pool.allocate(num_fresh) if has_room else None
        if fresh is None:
            self.pool.release(shared)
            return False
        sequence.block_ids = [*shared, *fresh]
        sequence.num_computed = sequence.num_cached = len(shared) * size
        return True

    def _make_room(self, sequence: Sequence) -> bool:
        """Give `sequence` the block of its next token, preempting victims while there is none. False when it must
        wait, or was itself preempted for an older one."""
        while sequence in self.running:
            if self.num_blocks_for(len(sequence.tokens)) <= len(sequence.block_ids):
                return True
            fresh = self.pool.allocate(1)
            if fresh is not None:
                sequence.block_ids.extend(fresh)
                return True
            victim = self._victim(sequence)
            if victim is None:
                return False
            self._preempt(victim)
        return False

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """One whose reader takes nothing, else the newest unless it is shielded, or no newer than `sequence`."""
        newest = self.running[-1]
        is_fair = newest is not sequence and newest not in self._shielded()
        return self._newest_idle() or (newest if is_fair else None)

    def _newest_idle(self) -> Sequence | None:
        return next((sequence for sequence in reversed(self.running) if sequence.credit <= 0), None)

    def _has_claim(self, sequence: Sequence) -> bool:
        """Whether `sequence` may run as far as those are concerned that must never be preempted any more."""
        holders = self._shielded(sequence)
        return sequence not in holders or self._fits(holders)

    def _shielded(self, *joining: Sequence) -> list[Sequence]:
        """Of those that run, and `joining`: the ones at the bound and all that are older."""
        present = [*self.running, *joining]
        at_bound = [sequence.arrival for sequence in present if sequence.num_forced >= MAX_PREEMPTIONS]
        return [sequence for sequence in present if sequence.arrival <= max(at_bound, default=-1)]

    def _fits(self, sequences: Iterable[Sequence]) -> bool:
        """Whether all that these may become fits the pool, were they alone in it."""
        lengths = (sequence.max_len(self.limits.context_len) for sequence in sequences)
        return sum(self.num_blocks_for(length) for length in lengths) <= self.pool.num_blocks

    def _preempt(self, sequence: Sequence) -> None:
        self.pool.release(self.detach(sequence))
        self.num_preemptions += 1
        sequence.num_lost = max(sequence.num_lost, sequence.num_computed)
        sequence.num_computed = 0
        if sequence.is_scored:
            sequence.scores.clear()
        sequence.num_preemptions += 1
        sequence.num_forced += sequence.credit > 0
        sequence.waits_since_s = self.clock()
        insort(self.waiting, sequence, key=_turn)


def _turn(sequence: Sequence) -> tuple[int, int]:
    """The order of those that wait. Priority decides who is admitted, age who is preempted."""
    return sequence.params.priority, sequence.arrival


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
