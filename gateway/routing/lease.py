"""The blocks of a failed attempt that its prefill worker still holds. Ends by being taken over or given back."""

from dataclasses import dataclass

from core.ids import HandoffId
from core.worker import WorkerRecord
from gateway.routing import commands
from gateway.routing.link import WorkerLink


@dataclass(frozen=True, slots=True)
class Lease:
    """Owned by the orchestrator between two attempts. When the session that it was made in has ended, so has the
    lease: whoever takes it over then has the prompt computed again."""

    link: WorkerLink
    handoff_id: HandoffId

    @property
    def holder(self) -> WorkerRecord:
        return self.link.record

    def give_back(self, reason: str) -> None:
        self.link.send(commands.abort_prefill(self.handoff_id, reason))
