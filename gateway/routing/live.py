"""What the gateway keeps of a request while it runs. Data only."""

import asyncio
from dataclasses import dataclass, field

from core.handoff import HandoffState
from core.ids import RequestId
from core.scores import PromptScore
from gateway.generation import GenerationRequest
from gateway.timing import StageClock


@dataclass(slots=True)
class HandoffReport:
    """What is known of a request's handoffs so far: filled by its attempts, read by usage, timing and metrics. `hits`
    are prompt tokens found in caches: `prefill`, not computed; `decode`, not sent; `local`, not computed by a decode
    worker that had the whole prompt to compute. `num_tokens` are those that the client took, `outcome` says why there
    are no more: empty while there may be."""

    prefill_worker_id: str = ""
    decode_worker_id: str = ""
    connector: str = ""
    num_kv_bytes: int = 0
    num_cached_tokens: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    num_refusals: int = 0
    num_attempts: int = 0
    num_preemptions: int = 0
    num_tokens: int = 0
    outcome: str = ""
    state: HandoffState = HandoffState.PENDING
    causes: list[str] = field(default_factory=list)
    prompt_scores: list[PromptScore] = field(default_factory=list)

    def add_hits(self, source: str, num_tokens: int) -> None:
        """Of attempts that found some the first one counts; what need not be sent is another matter than what need
        not be computed."""
        if source == "decode" and num_tokens:
            self.hits.setdefault(source, num_tokens)
        elif num_tokens and not self.num_cached_tokens:
            self.hits[source] = self.num_cached_tokens = num_tokens

    def add_scores(self, position: int, scores: list[PromptScore]) -> None:
        """Of the prompt's tokens from `position` on. What another attempt told already is dropped, and what leaves a
        gap: the first token finds that some are missing."""
        num_known = len(self.prompt_scores) + 1 - position
        if num_known >= 0:
            self.prompt_scores += scores[num_known:]


@dataclass(frozen=True, slots=True)
class Live:
    """A running choice, as `/cluster` and abort see it. `is_handed_over` is set when its prompt's blocks are where it
    decodes, and at its end: others of the same `leader` go on then. `answer_id` is what the client knows its whole
    request by: the id of the first choice, which may have ended before the others."""

    request: GenerationRequest
    clock: StageClock
    report: HandoffReport
    cancelled: asyncio.Event
    is_handed_over: asyncio.Event = field(default_factory=asyncio.Event)
    leader: "Live | None" = None
    answer_id: RequestId | None = None

    @property
    def hosts(self) -> tuple[str, ...]:
        """Workers that have had the prompt's blocks."""
        return tuple(name for name in (self.report.prefill_worker_id, self.report.decode_worker_id) if name)
