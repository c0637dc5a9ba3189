"""What the decode tier adds to an engine: blocks and places reserved before KV arrives, a bounded queue of reserves
that hold nothing, and quarantine for blocks that a writer may still touch. No torch, no I/O.

    Reserve ─► queued ─► reserved (blocks in flight) ──Activate──► running ─► finished
                  └───────────────┴───────── AbortWork ────────────────┴────► released | quarantined
"""

from collections import deque
from dataclasses import dataclass

from core.errors import ErrorCode
from core.ids import BlockHash, BlockId, HandoffId
from engine.block_pool import BlockState
from engine.engine import Engine
from engine.messages import (
    AbortWork,
    Activate,
    AnyCommand,
    AnyEvent,
    Credit,
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


@dataclass(frozen=True, slots=True)
class Reservation:
    """A sequence whose `in_flight` blocks are being received; its other blocks are cached ones it shares and the
    room for its next token."""

    sequence: Sequence
    in_flight: list[BlockId]


class DecodeTier:
    """Every handoff is in exactly one of the four tables."""

    def __init__(self, engine: Engine, fingerprint: str) -> None:
        self.engine = engine
        self.events: list[AnyEvent] = []
        self._fingerprint = fingerprint
        self._queue: deque[tuple[float, Reserve]] = deque()
        self._reserved: dict[HandoffId, Reservation] = {}
        self._running: dict[HandoffId, Sequence] = {}
        self._quarantined: dict[HandoffId, list[BlockId]] = {}

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
                if command.id in self._running:
                    self._running[command.id].credit += command.num_tokens
            case AbortWork():
                self._abort(command.id, command.is_quiet)
            case Quiet():
                self.engine.scheduler.pool.release(
                    self._quarantined.pop(command.id, []), BlockState.QUARANTINED
                )
            case _:
                raise AssertionError(f"not a decode command: {command}")

    def step(self) -> bool:
        self._serve_queue()
        progress = self.engine.step()
        for item in progress:
            self._report(item)
        if progress:
            self._serve_queue()
        return bool(progress)

    def announce(self, work: list[Work]) -> None:
        """Nothing to add: grants are among the events already and leave before the step computes."""

    def fail_step(self, error: Exception) -> None:
        for sequence, _ in self.engine.work:
            self._fail(sequence, f"engine step failed: {type(error).__name__}: {error}")

    def _enqueue(self, command: Reserve) -> None:
        scheduler = self.engine.scheduler
        num_tokens = len(command.prompt_ids) + len(command.output_ids)
        if scheduler.num_blocks_for(num_tokens + 1) > scheduler.pool.num_blocks:
            self._refuse(command.id, ErrorCode.INVALID, f"{num_tokens} tokens do not fit the decode pool")
        elif len(self._queue) >= MAX_QUEUED_RESERVES:
            self._refuse(command.id, ErrorCode.BUSY, "the queue of reserves is full")
        else:
            self._queue.append((scheduler.clock() + command.wait_s, command))

    def _serve_queue(self) -> None:
        """Grant in order of arrival while there is room; refuse those that waited long enough."""
        while self._queue and self._reserve(self._queue[0][1]):
            self._queue.popleft()
        now_s = self.engine.scheduler.clock()
        for entry in [entry for entry in self._queue if entry[0] <= now_s]:
            self._queue.remove(entry)
            self._refuse(entry[1].id, ErrorCode.BUSY, "no room for the prompt's blocks")

    def _refuse(self, handoff_id: HandoffId, code: ErrorCode, message: str) -> None:
        self.events.append(WorkFailed(handoff_id, code, message))

    def _reserve(self, command: Reserve) -> bool:
        """Take a batch place and blocks for the tokens plus one, leaving a free block for each running sequence."""
        scheduler, pool = self.engine.scheduler, self.engine.scheduler.pool
        tokens = [*command.prompt_ids, *command.output_ids]
        sequence = Sequence(command.id, tokens, len(command.prompt_ids), command.params, self._fingerprint)
        sequence.credit = command.credit
        shared = pool.lookup(scheduler.full_chain(sequence, len(tokens)))
        num_fresh = scheduler.num_blocks_for(len(tokens) + 1) - len(shared)
        pool.acquire(shared)
        has_room = scheduler.num_free_places > 0 and pool.num_available - num_fresh >= len(scheduler.running)
        fresh = pool.allocate(num_fresh, BlockState.IN_FLIGHT) if has_room else None
        if fresh is None:
            pool.release(shared)
            return False
        num_in_flight = scheduler.num_blocks_for(len(tokens)) - len(shared)
        pool.move(fresh[num_in_flight:], BlockState.IN_FLIGHT, BlockState.OWNED)
        sequence.block_ids = [*shared, *fresh]
        sequence.num_cached = len(shared) * scheduler.limits.block_size
        scheduler.num_reserved_places += 1
        self._reserved[command.id] = Reservation(sequence, fresh[:num_in_flight])
        self.events.append(
            Reserved(
                command.id,
                fresh[:num_in_flight],
                len(tokens),
                sequence.num_cached,
                self._chain_hash(sequence),
            )
        )
        return True

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
        scheduler.pool.move(reservation.in_flight, BlockState.IN_FLIGHT, BlockState.OWNED)
        sequence.num_computed = len(sequence.tokens)
        scheduler.register_full_blocks(sequence, sequence.num_cached)
        sequence.tokens.append(command.first_tokens[0].token_id)
        self._running[command.id] = sequence
        scheduler.resume(sequence)

    def _report(self, progress: Progress) -> None:
        sequence, token, reason = progress
        if token is None:
            return
        if not token.is_valid:
            self._fail(sequence, "the model produced logits that are not finite")
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
            )
        )
        if reason is not None:
            del self._running[sequence.id]
            self.engine.scheduler.finish(sequence)

    def _abort(self, handoff_id: HandoffId, is_quiet: bool) -> None:
        self._queue = deque(entry for entry in self._queue if entry[1].id != handoff_id)
        reservation = self._reserved.pop(handoff_id, None)
        if reservation is not None:
            self._drop_reservation(reservation, is_quiet)
        sequence = self._running.pop(handoff_id, None)
        if sequence is not None:
            self.engine.scheduler.finish(sequence)
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

    def _fail(self, sequence: Sequence, message: str) -> None:
        self._running.pop(sequence.id, None)
        self.engine.scheduler.finish(sequence)
        self.events.append(WorkFailed(sequence.id, ErrorCode.ENGINE, message))
