"""What a prefill worker's transfers have carried since its start, by connector."""

from core.load import Sent
from prefill_service.handoff import PrefillHandoff


class SentCounts:
    def __init__(self) -> None:
        self._by_connector: dict[str, Sent] = {}

    def note(self, handoff: PrefillHandoff) -> None:
        """A handoff's transfer is over, however it ended; one that was never begun is none."""
        name = handoff.connector
        if name:
            before = self._by_connector.get(name, Sent(name, 0, 0, 0.0))
            self._by_connector[name] = Sent(
                name,
                before.num_transfers + 1,
                before.num_bytes + handoff.num_bytes_sent,
                before.seconds + handoff.send_s,
            )

    def read(self) -> tuple[Sent, ...]:
        return tuple(self._by_connector.values())
