"""What the prefill tier adds to an engine: prompts end with their first token, and their blocks are leased until the
handoff's seal is verified. No torch, no I/O."""

from core.errors import ErrorCode
from core.grant import FirstToken
from core.ids import BlockHash, BlockId, HandoffId
from engine.block_pool import BlockState
from engine.engine import Engine
from engine.messages import (
    AbortWork,
    AnyCommand,
    AnyEvent,
    Computed,
    First,
    Release,
    Started,
    StartPrompt,
    WorkAborted,
    WorkFailed,
)
from engine.scheduler import Progress, Work
from engine.sequence import Sequence


class PrefillTier:
    """Sequences by handoff while they are computed, leased blocks by handoff afterwards."""

    def __init__(self, engine: Engine, fingerprint: str) -> None:
        self.engine = engine
        self.events: list[AnyEvent] = []
        self._fingerprint = fingerprint
        self._sequences: dict[HandoffId, Sequence] = {}
        self._leases: dict[HandoffId, list[BlockId]] = {}
        self._announced: set[HandoffId] = set()

    @property
    def num_waiting(self) -> int:
        return len(self.engine.scheduler.waiting)

    def handle(self, command: AnyCommand) -> None:
        match command:
            case StartPrompt():
                self._start(command)
            case Release():
                self._drop(command.id)
            case AbortWork():
                self._abort(command.id)
            case _:
                raise AssertionError(f"not a prefill command: {command}")

    def step(self) -> bool:
        progress = self.engine.step()
        for item in progress:
            self._report(item)
        return bool(progress)

    def announce(self, work: list[Work]) -> None:
        """Report the newly admitted before they are computed: the decode side can grant meanwhile."""
        for sequence, _ in work:
            if sequence.id not in self._announced:
                self._announced.add(sequence.id)
                self.events.append(Started(sequence.id, list(sequence.block_ids), sequence.num_cached))

    def fail_step(self, error: Exception) -> None:
        for sequence in [item.sequence for item in self.engine.work if item.sequence.id in self._sequences]:
            self._fail(sequence, ErrorCode.ENGINE, f"engine step failed: {type(error).__name__}: {error}")

    def _start(self, command: StartPrompt) -> None:
        """Queue a prompt, or refuse one that could never run. A repeated start changes nothing."""
        if command.id in self._sequences or command.id in self._leases:
            return
        tokens = [*command.prompt_ids, *command.output_ids]
        sequence = Sequence(command.id, tokens, len(command.prompt_ids), command.params, self._fingerprint)
        scheduler = self.engine.scheduler
        if not scheduler.can_run(sequence, len(tokens)):
            message = f"{len(tokens)} tokens do not fit the prefill worker"
            self.events.append(WorkFailed(command.id, ErrorCode.INVALID, message))
            return
        self._sequences[command.id] = sequence
        scheduler.submit(sequence)

    def _report(self, progress: Progress) -> None:
        sequence, token, reason = progress
        if token is not None and not token.is_valid:
            self._fail(sequence, ErrorCode.ENGINE, "the model produced logits that are not finite")
            return
        self.events.append(Computed(sequence.id, sequence.num_computed))
        if token is None:
            return
        position = sequence.num_outputs - 1
        first = FirstToken(sequence.choice, position, token.token_id, token.logprob, reason is not None)
        self.events.append(First(sequence.id, [first], [reason or ""], self._chain_hash(sequence)))
        self._lease(sequence)

    def _chain_hash(self, sequence: Sequence) -> BlockHash:
        """That of the last full block of the tokens whose KV is handed over."""
        chain = self.engine.scheduler.full_chain(sequence, sequence.num_computed)
        return chain[-1] if chain else BlockHash(b"")

    def _lease(self, sequence: Sequence) -> None:
        self._forget(sequence.id)
        blocks = self.engine.scheduler.detach(sequence)
        self.engine.scheduler.pool.move(blocks, BlockState.OWNED, BlockState.LEASED)
        self._leases[sequence.id] = blocks

    def _drop(self, handoff_id: HandoffId) -> None:
        """Give back what it holds, at whatever stage it is."""
        sequence = self._sequences.get(handoff_id)
        if sequence is not None:
            self._forget(handoff_id)
            self.engine.scheduler.finish(sequence)
        self.engine.scheduler.pool.release(self._leases.pop(handoff_id, []), BlockState.LEASED)

    def _abort(self, handoff_id: HandoffId) -> None:
        self._drop(handoff_id)
        self.events.append(WorkAborted(handoff_id))

    def _fail(self, sequence: Sequence, code: ErrorCode, message: str) -> None:
        self._forget(sequence.id)
        self.engine.scheduler.finish(sequence)
        self.events.append(WorkFailed(sequence.id, code, message))

    def _forget(self, handoff_id: HandoffId) -> None:
        self._sequences.pop(handoff_id, None)
        self._announced.discard(handoff_id)
