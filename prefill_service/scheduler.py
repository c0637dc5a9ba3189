"""What the prefill tier adds to an engine: prompts end with their first token, and their blocks are leased until the
handoff's seal is verified. No torch, no I/O.

    StartPrompt ─► queued ─► started ─────► sampled (blocks leased) ─► Release | AbortWork
                               └── at most MAX_UNGRANTED of these have no grant ──┘
"""

from dataclasses import dataclass

from core.errors import EngineFailed, ErrorCode, TandemError
from core.grant import FirstToken
from core.ids import BlockHash, BlockId, HandoffId
from engine.block_pool import BlockState
from engine.cache_traffic import CacheTraffic
from engine.engine import Engine
from engine.messages import (
    AbortWork,
    AnyCommand,
    AnyEvent,
    ClearCache,
    Computed,
    EndLoan,
    FetchBlocks,
    Fetched,
    First,
    Granted,
    LendBlocks,
    PromptScores,
    Release,
    Started,
    StartPrompt,
    WorkAborted,
    WorkFailed,
)
from engine.scheduler import Progress, Work
from engine.sequence import Sequence

MAX_UNGRANTED = 16


@dataclass(frozen=True, slots=True)
class Lease:
    """The blocks of a computed prompt of `num_tokens`, and what its last token led to."""

    block_ids: list[BlockId]
    num_tokens: int
    num_cached_tokens: int
    first: First


class PrefillTier:
    """Sequences by handoff while they are computed, leases by handoff afterwards; `_ungranted` are those started, of
    either kind, that no decode worker has blocks for yet."""

    def __init__(self, engine: Engine, fingerprint: str) -> None:
        self.engine = engine
        self.events: list[AnyEvent] = []
        self._traffic = CacheTraffic(engine)
        self._fingerprint = fingerprint
        self._sequences: dict[HandoffId, Sequence] = {}
        self._leases: dict[HandoffId, Lease] = {}
        self._announced: set[HandoffId] = set()
        self._ungranted: set[HandoffId] = set()

    @property
    def num_waiting(self) -> int:
        return len(self.engine.scheduler.waiting)

    def handle(self, command: AnyCommand) -> None:
        match command:
            case StartPrompt():
                self._start(command)
            case Granted():
                self._ungranted.discard(command.id)
            case Release():
                self._drop(command.id)
            case AbortWork():
                self._drop(command.id)
                self.events.append(WorkAborted(command.id))
            case ClearCache():
                self.engine.scheduler.pool.clear_cache()
                self._traffic.clear()
            case FetchBlocks() | Fetched() | LendBlocks() | EndLoan():
                self.events += self._traffic.handle(command)
            case _:
                raise AssertionError(f"not a prefill command: {command}")

    def prepare(self) -> None:
        self._hold_back()
        for sequence, error in self.engine.scheduler.misguided:
            self._fail(sequence, error)

    def step(self) -> bool:
        self.prepare()
        progress = self.engine.step()
        for item in progress:
            self.report(item)
        return bool(progress)

    def announce(self, work: list[Work]) -> None:
        """Report the newly admitted before they are computed: the decode side can grant meanwhile."""
        for sequence, _ in work:
            if sequence.id not in self._announced:
                self._announced.add(sequence.id)
                self._ungranted.add(sequence.id)
                self.events.append(_started(sequence))

    def fail_step(self, error: Exception) -> None:
        for sequence in [item.sequence for item in self.engine.work if item.sequence.id in self._sequences]:
            self._fail(sequence, EngineFailed(f"engine step failed: {type(error).__name__}: {error}"))

    def _hold_back(self) -> None:
        """Prompts beyond MAX_UNGRANTED stay in the queue, which admission looks at: a saturated decode tier must not
        fill this pool with prompts that nobody takes. Places are taken for whom there is none."""
        scheduler = self.engine.scheduler
        num_allowed = max(MAX_UNGRANTED - len(self._ungranted), 0)
        num_free = scheduler.limits.max_batch - len(scheduler.running)
        scheduler.num_reserved_places = max(num_free - num_allowed, 0)

    def _start(self, command: StartPrompt) -> None:
        """Queue a prompt, or refuse one that could never run. A repeated start changes nothing."""
        if command.id in self._sequences or command.id in self._leases:
            return
        earlier = HandoffId(command.id.request_id, command.takes_over)
        if command.takes_over and self._take_over(earlier, command.id):
            return
        sequence = self.make_sequence(command)
        scheduler = self.engine.scheduler
        num_tokens = len(sequence.tokens)
        if not scheduler.can_run(sequence, num_tokens):
            message = f"{num_tokens} tokens do not fit the prefill worker"
            self.events.append(WorkFailed(command.id, ErrorCode.INVALID, message))
            return
        sequence.guide = self.engine.guide(command.params)
        self._sequences[command.id] = sequence
        scheduler.submit(sequence)

    def make_sequence(self, command: StartPrompt) -> Sequence:
        tokens = [*command.prompt_ids, *command.output_ids]
        return Sequence(
            command.id,
            tokens,
            len(command.prompt_ids),
            command.params,
            self._fingerprint,
            cache_salt=command.cache_salt,
        )

    def _take_over(self, earlier: HandoffId, new: HandoffId) -> bool:
        """Go on with what `earlier` holds under its new id, telling again what is known of it. False when nothing of
        it is here."""
        sequence = self._sequences.pop(earlier, None)
        lease = self._leases.pop(earlier, None)
        self._ungranted.discard(earlier)
        if sequence is not None:
            self._sequences[new] = sequence
            sequence.id = new
            if earlier in self._announced:
                self._announced = self._announced - {earlier} | {new}
                self._ungranted.add(new)
                self.events += [_started(sequence), Computed(new, sequence.num_computed)]
        elif lease is not None:
            self._ungranted.add(new)
            first = First(new, lease.first.first_tokens, lease.first.finish_reasons, lease.first.chain_hash)
            self._leases[new] = Lease(lease.block_ids, lease.num_tokens, lease.num_cached_tokens, first)
            started = Started(new, lease.block_ids, lease.num_cached_tokens, lease.num_tokens)
            self.events += [started, Computed(new, lease.num_tokens), first]
        return sequence is not None or lease is not None

    def report(self, progress: Progress) -> None:
        """Append what became of one sequence in a step."""
        sequence, token, reason = progress
        if token is not None and not token.is_valid:
            self._fail(sequence, token.error)
            return
        if scores := sequence.take_scores():
            self.events.append(PromptScores(sequence.id, sequence.num_scored - len(scores) + 1, scores))
        self.events.append(Computed(sequence.id, sequence.num_computed))
        if token is None:
            return
        position = sequence.num_outputs - 1
        first_token = FirstToken(
            sequence.choice, position, token.token_id, token.logprob, reason is not None, token.top
        )
        first = First(sequence.id, [first_token], [reason or ""], self._chain_hash(sequence))
        self.events.append(first)
        self._lease(sequence, first)

    def _chain_hash(self, sequence: Sequence) -> BlockHash:
        """That of the last full block of the tokens whose KV is handed over."""
        chain = self.engine.scheduler.full_chain(sequence, sequence.num_computed)
        return chain[-1] if chain else BlockHash(b"")

    def _lease(self, sequence: Sequence, first: First) -> None:
        self._forget(sequence.id)
        blocks = self.engine.scheduler.detach(sequence)
        self.engine.scheduler.pool.move(blocks, BlockState.OWNED, BlockState.LEASED)
        self._leases[sequence.id] = Lease(blocks, sequence.num_computed, sequence.num_cached, first)

    def _drop(self, handoff_id: HandoffId) -> None:
        """Give back what it holds, at whatever stage it is."""
        self._ungranted.discard(handoff_id)
        sequence = self._sequences.get(handoff_id)
        if sequence is not None:
            self._forget(handoff_id)
            self.engine.scheduler.finish(sequence)
        lease = self._leases.pop(handoff_id, None)
        if lease is not None:
            self.engine.scheduler.pool.release(lease.block_ids, BlockState.LEASED)

    def _fail(self, sequence: Sequence, error: TandemError) -> None:
        self._drop(sequence.id)
        self.events.append(WorkFailed(sequence.id, error.code, str(error), getattr(error, "field", "")))

    def _forget(self, handoff_id: HandoffId) -> None:
        self._sequences.pop(handoff_id, None)
        self._announced.discard(handoff_id)


def _started(sequence: Sequence) -> Started:
    return Started(sequence.id, list(sequence.block_ids), sequence.num_cached, len(sequence.tokens))
