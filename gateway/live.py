"""What the gateway keeps of a request while it runs. Data only."""

import asyncio
from dataclasses import dataclass, field

from core.handoff import HandoffState
from gateway.generation import GenerationRequest
from gateway.timing import StageClock


@dataclass(slots=True)
class HandoffReport:
    """What is known of a request's handoffs so far: filled by its attempts, read by usage and timing."""

    prefill_worker_id: str = ""
    decode_worker_id: str = ""
    connector: str = ""
    num_kv_bytes: int = 0
    num_cached_tokens: int = 0
    num_attempts: int = 0
    num_preemptions: int = 0
    state: HandoffState = HandoffState.PENDING
    causes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Live:
    """A running request, as `/cluster` and abort see it."""

    request: GenerationRequest
    clock: StageClock
    report: HandoffReport
    cancelled: asyncio.Event
