"""The decode side of one handoff: grant, receive, verify. Knows nothing of gRPC or sessions."""

from core.errors import TransferFailed
from core.grant import Grant, Seal
from core.handoff import Handoff, HandoffState
from core.ids import HandoffId
from kv_transfer.connectors import ReceiverSet


class DecodeHandoff:
    """Fed by the engine's events; `receive()` is the life of its transfer. One task runs it."""

    def __init__(self, handoff_id: HandoffId, deadline_s: float, receivers: ReceiverSet) -> None:
        self.id = handoff_id
        self._deadline_s = deadline_s
        self._receivers = receivers
        self.lifetime = Handoff()
        self.grant: Grant | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks that the grant asks for."""
        return len(self.grant.block_ids) if self.grant is not None else 0

    async def receive(self) -> Seal:
        """The verified seal, waited for as long as the request may take: whoever grants knows neither when the prompt
        is computed nor when its transfer starts. Raises TransferFailed or DeadlineExceeded: nothing that arrived may
        be used."""
        self.lifetime.advance(HandoffState.RECEIVING)
        seal = await self._receivers.wait_sealed(self.id, self._deadline_s)
        if not seal.first_tokens:
            raise TransferFailed("the seal has no first token")
        self.lifetime.advance(HandoffState.SEALED)
        self.lifetime.advance(HandoffState.DECODING)
        return seal

    def granted(self, grant: Grant) -> None:
        self.grant = grant
        self.lifetime.advance(HandoffState.GRANTED)

    def finish(self) -> None:
        """The last token was made. A request that is prefilled here has no grant and no transfer to have ended."""
        if self.lifetime.state is HandoffState.PENDING:
            self.lifetime.advance(HandoffState.DECODING)
        self.lifetime.advance(HandoffState.FINISHED)

    async def cancel(self) -> bool:
        """Stop receiving. True once nothing writes into the granted blocks any more."""
        if self.lifetime.state not in (HandoffState.GRANTED, HandoffState.RECEIVING):
            return True
        return await self._receivers.cancel(self.id)
