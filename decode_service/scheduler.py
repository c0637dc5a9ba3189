"""What the decode tier adds to an engine: blocks and places reserved before KV arrives, a bounded queue of reserves
that hold nothing, and quarantine for blocks that a writer may still touch. No torch, no I/O.

    Reserve ─► queued ─► reserved (blocks in flight) ──Activate──► running ─► finished
                  └───────────────┴───────── AbortWork ────────────────┴────► released | quarantined
"""

from bisect import insort
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from core.errors import DeadlineExceeded, EngineFailed, ErrorCode, TandemError
from core.ids import BlockHash, BlockId, HandoffId
from engine.block_pool import BlockState
from engine.cache_traffic import CacheTraffic
from engine.config import MAX_LOCAL_TOKENS
from engine.engine import Engine
from engine.messages import (
    AbortWork,
    Activate,
    AnyCommand,
    AnyEvent,
    ClearCache,
    Credit,
    EndLoan,
    FetchBlocks,
    Fetched,
    LendBlocks,
    PromptScores,
    Quiet,
    Reserve,
    Reserved,
    Token,
    WorkAborted,
    WorkFailed,
)
from engine.scheduler import Progress, Work
from engine.sequence import Sequence

MAX_QUEUED_RESERVES = 256
SUSPEND_LIMIT_S = 60.0


class QueuedReserve(NamedTuple):
    """A reserve that waits for room, until then: in order of priority, then of arrival."""

    priority: int
    number: int
    until_s: float
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Reservation:
    """A sequence whose `in_flight` blocks are being received; its other blocks are cached ones it shares and the
    room for its next token."""

    sequence: Sequence
    in_flight: list[BlockId]


class DecodeTier:
    """Every handoff is in exactly one of the first four tables; `_suspended` says since when those running ones have
    had no credit, the longest first."""

    def __init__(self, engine: Engine, fingerprint: str, max_local_tokens: int = MAX_LOCAL_TOKENS) -> None:
        """Prompts of which no more than `max_local_tokens` are not cached are computed here on request. One that has
        no such bound queues them, too, when the batch is full: there is nobody else."""
        self.engine = engine
        self._max_local_tokens = max_local_tokens
        self.events: list[AnyEvent] = []
        self._traffic = CacheTraffic(engine)
        self._fingerprint = fingerprint
        self._queue: list[QueuedReserve] = []
        self._numbers = count()
        self._reserved: dict[HandoffId, Reservation] = {}
        self._running: dict[HandoffId, Sequence] = {}
        self._quarantined: dict[HandoffId, list[BlockId]] = {}
        self._suspended: dict[HandoffId, float] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._queue) + len(self.engine.scheduler.waiting)

    def handle(self, command: AnyCommand) -> None:
        match command:
            case Reserve():
                self._enqueue(command)
            case Activate():
                self._activate(command)
            case Credit():
                self._add_credit(command)
            case AbortWork():
                self._abort(command.id, command.is_quiet)
            case Quiet():
                self.engine.scheduler.pool.release(
                    self._quarantined.pop(command.id, []), BlockState.QUARANTINED
                )
            case ClearCache():
                self.engine.scheduler.pool.clear_cache()
                self._traffic.clear()
            case FetchBlocks() | Fetched() | LendBlocks() | EndLoan():
                self.events += self._traffic.handle(command)
            case _:
                raise AssertionError(f"not a decode command: {command}")

    def prepare(self) -> None:
        self._end_suspended()
        for sequence, error in self.engine.scheduler.misguided:
            self._fail(sequence, error)
        self._serve_queue()

    def step(self) -> bool:
        self.prepare()
        progress = self.engine.step()
        for item in progress:
            self.report(item)
        if progress:
            self._serve_queue()
        return bool(progress)

    def announce(self, work: list[Work]) -> None:
        """Nothing to add: grants are among the events already and leave before the step computes."""

    def fail_step(self, error: Exception) -> None:
        for sequence in [item.sequence for item in self.engine.work if item.sequence.id in self._running]:
            self._fail(sequence, EngineFailed(f"engine step failed: {type(error).__name__}: {error}"))

    def _enqueue(self, command: Reserve) -> None:
        """Queue a reserve, or refuse one that could never be served to its end. A repeated one changes nothing."""
        scheduler = self.engine.scheduler
        sequence = self.make_sequence(command)
        max_len = sequence.max_len(scheduler.limits.context_len)
        if self._is_known(command.id):
            return
        if not scheduler.can_run(sequence, max_len):
            self._refuse(command.id, ErrorCode.INVALID, f"{max_len} tokens do not fit the decode worker")
        elif command.is_local:
            self._prefill_locally(sequence)
        elif len(self._queue) >= MAX_QUEUED_RESERVES:
            self._refuse(command.id, ErrorCode.BUSY, "the queue of reserves is full")
        else:
            sequence.guide = self.engine.guide(command.params)
            until_s = scheduler.clock() + command.wait_s
            insort(
                self._queue, QueuedReserve(command.params.priority, next(self._numbers), until_s, sequence)
            )

    def _prefill_locally(self, sequence: Sequence) -> None:
        """Queue a prompt to be computed in chunks between the other sequences' tokens: only a short one may, where
        others compute the long ones."""
        scheduler = self.engine.scheduler
        is_colocated = self._max_local_tokens >= scheduler.limits.context_len
        cached = scheduler.pool.lookup(scheduler.full_chain(sequence, len(sequence.tokens) - 1))
        num_uncached = len(sequence.tokens) - len(cached) * scheduler.limits.block_size
        if num_uncached > self._max_local_tokens:
            limit = self._max_local_tokens
            message = f"{num_uncached} uncached tokens are more than the {limit} prefilled on decode"
            self._refuse(sequence.id, ErrorCode.BUSY, message)
        elif len(scheduler.waiting) >= MAX_QUEUED_RESERVES or not (is_colocated or scheduler.make_place()):
            self._refuse(sequence.id, ErrorCode.BUSY, "no place in the batch")
        else:
            sequence.guide = self.engine.guide(sequence.params)
            self._running[sequence.id] = sequence
            scheduler.submit(sequence)

    def _is_known(self, handoff_id: HandoffId) -> bool:
        tables = (self._reserved, self._running, self._quarantined)
        is_held = any(handoff_id in table for table in tables)
        return is_held or any(entry.sequence.id == handoff_id for entry in self._queue)

    def _add_credit(self, command: Credit) -> None:
        sequence = self._running.get(command.id)
        if sequence is None and command.id in self._reserved:
            sequence = self._reserved[command.id].sequence
        if sequence is not None:
            sequence.credit += command.num_tokens
            if sequence.credit > 0:
                self._suspended.pop(command.id, None)

    def _end_suspended(self) -> None:
        """A reader that takes nothing for too long loses its blocks to others."""
        over_s = self.engine.scheduler.clock() - SUSPEND_LIMIT_S
        for handoff_id in [key for key, since_s in self._suspended.items() if since_s <= over_s]:
            message = f"no token was taken for {SUSPEND_LIMIT_S:g} s"
            self._fail(self._running[handoff_id], DeadlineExceeded(message))

    def _serve_queue(self) -> None:
        """Grant in order while there is room; refuse those that waited long enough."""
        while self._queue and self._reserve(self._queue[0].sequence):
            del self._queue[0]
        now_s = self.engine.scheduler.clock()
        for entry in [entry for entry in self._queue if entry.until_s <= now_s]:
            self._queue.remove(entry)
            self._refuse(entry.sequence.id, ErrorCode.BUSY, "no room for the prompt's blocks")

    def _refuse(self, handoff_id: HandoffId, code: ErrorCode, message: str) -> None:
        self.events.append(WorkFailed(handoff_id, code, message))

    def _reserve(self, sequence: Sequence) -> bool:
        """Take a batch place and blocks for the tokens plus one, at the cost of those whose readers take nothing.
        Whoever was preempted comes first, unless it waits for others to end."""
        scheduler = self.engine.scheduler
        if scheduler.next_waiting is not None or not scheduler.make_place():
            return False
        while (in_flight := self._take_blocks(sequence)) is None:
            if not scheduler.preempt_idle():
                return False
        scheduler.num_reserved_places += 1
        self._reserved[sequence.id] = Reservation(sequence, in_flight)
        chain_hash = self._chain_hash(sequence)
        num_tokens = len(sequence.tokens)
        self.events.append(Reserved(sequence.id, in_flight, num_tokens, sequence.num_cached, chain_hash))
        return True

    def _take_blocks(self, sequence: Sequence) -> list[BlockId] | None:
        """Give it all its blocks, leaving a free one for each running sequence; those that are to be received. None
        when there is no room."""
        scheduler, pool = self.engine.scheduler, self.engine.scheduler.pool
        tokens = sequence.tokens
        shared = pool.lookup(scheduler.full_chain(sequence, len(tokens))) if pool.has_prefix_cache else []
        num_fresh = scheduler.num_blocks_for(len(tokens) + 1) - len(shared)
        pool.acquire(shared)
        has_room = pool.num_available - num_fresh >= len(scheduler.running)
        fresh = pool.allocate(num_fresh, BlockState.IN_FLIGHT) if has_room else None
        if fresh is None:
            pool.release(shared)
            return None
        num_in_flight = scheduler.num_blocks_for(len(tokens)) - len(shared)
        pool.move(fresh[num_in_flight:], BlockState.IN_FLIGHT, BlockState.OWNED)
        sequence.block_ids = [*shared, *fresh]
        sequence.num_cached = len(shared) * scheduler.limits.block_size
        return fresh[:num_in_flight]

    def make_sequence(self, command: Reserve) -> Sequence:
        tokens = [*command.prompt_ids, *command.output_ids]
        num_prompt_tokens = len(command.prompt_ids)
        return Sequence(
            command.id,
            tokens,
            num_prompt_tokens,
            command.params,
            self._fingerprint,
            cache_salt=command.cache_salt,
            credit=command.credit,
        )

    def _chain_hash(self, sequence: Sequence) -> BlockHash:
        chain = self.engine.scheduler.full_chain(sequence, len(sequence.tokens))
        return chain[-1] if chain else BlockHash(b"")

    def _activate(self, command: Activate) -> None:
        """The received blocks are whole: they join the prefix cache and the sequence joins the batch."""
        reservation = self._reserved.pop(command.id, None)
        if reservation is None:
            return
        scheduler, sequence = self.engine.scheduler, reservation.sequence
        scheduler.num_reserved_places -= 1
        self.engine.take_in(reservation.in_flight)
        scheduler.pool.move(reservation.in_flight, BlockState.IN_FLIGHT, BlockState.OWNED)
        sequence.num_computed = len(sequence.tokens)
        scheduler.register_full_blocks(sequence, sequence.num_cached)
        sequence.tokens.append(command.first_tokens[0].token_id)
        self._running[command.id] = sequence
        scheduler.resume(sequence)
        self._note_suspended(sequence)

    def report(self, progress: Progress) -> None:
        """Append what became of one sequence in a step."""
        sequence, token, reason = progress
        if scores := sequence.take_scores():
            self.events.append(PromptScores(sequence.id, sequence.num_scored - len(scores) + 1, scores))
        if token is None:
            return
        if not token.is_valid:
            self._fail(sequence, token.error)
            return
        position = sequence.num_outputs - 1
        self.events.append(
            Token(
                sequence.id,
                sequence.choice,
                position,
                token.token_id,
                token.logprob,
                reason or "",
                sequence.queue_s,
                sequence.num_preemptions,
                token.top,
                sequence.num_cached,
            )
        )
        self._note_suspended(sequence)
        if reason is not None:
            self._end(sequence)

    def _abort(self, handoff_id: HandoffId, is_quiet: bool) -> None:
        self._queue = [entry for entry in self._queue if entry.sequence.id != handoff_id]
        reservation = self._reserved.pop(handoff_id, None)
        if reservation is not None:
            self._drop_reservation(reservation, is_quiet)
        sequence = self._running.get(handoff_id)
        if sequence is not None:
            self._end(sequence)
        self.events.append(WorkAborted(handoff_id))

    def _drop_reservation(self, reservation: Reservation, is_quiet: bool) -> None:
        scheduler, sequence = self.engine.scheduler, reservation.sequence
        scheduler.num_reserved_places -= 1
        written = set(reservation.in_flight)
        scheduler.pool.release([block for block in sequence.block_ids if block not in written])
        if is_quiet:
            scheduler.pool.release(reservation.in_flight, BlockState.IN_FLIGHT)
        else:
            scheduler.pool.move(reservation.in_flight, BlockState.IN_FLIGHT, BlockState.QUARANTINED)
            self._quarantined[sequence.id] = reservation.in_flight

    def _note_suspended(self, sequence: Sequence) -> None:
        if sequence.credit <= 0:
            self._suspended.setdefault(sequence.id, self.engine.scheduler.clock())

    def _fail(self, sequence: Sequence, error: TandemError) -> None:
        self._end(sequence)
        self.events.append(WorkFailed(sequence.id, error.code, str(error), getattr(error, "field", "")))

    def _end(self, sequence: Sequence) -> None:
        del self._running[sequence.id]
        self._suspended.pop(sequence.id, None)
        self.engine.scheduler.finish(sequence)
