"""The decode side of one handoff: grant, receive, verify. Knows nothing of gRPC or sessions."""

from dataclasses import dataclass

from core.errors import TransferFailed
from core.grant import Grant, GrantSigner, Seal
from core.handoff import Handoff, HandoffState
from core.ids import Epoch, HandoffId, WorkerId
from engine.messages import Reserved
from kv_transfer.connectors import ReceiverSet


@dataclass(frozen=True, slots=True)
class Granter:
    """Makes this worker's grants. The key lives and dies with the epoch."""

    worker_id: WorkerId
    epoch: Epoch
    signer: GrantSigner
    receivers: ReceiverSet

    def grant(self, reserved: Reserved) -> Grant:
        unsigned = Grant(
            handoff_id=reserved.id,
            worker_id=self.worker_id,
            epoch=self.epoch,
            num_prompt_tokens=reserved.num_tokens,
            num_cached_tokens=reserved.num_cached_tokens,
            block_ids=tuple(reserved.block_ids),
            addresses=tuple(self.receivers.addresses),
        )
        return self.signer.sign(unsigned)


class DecodeHandoff:
    """Fed by the engine's events; `receive()` is the life of its transfer. One task runs it."""

    def __init__(self, handoff_id: HandoffId) -> None:
        self.id = handoff_id
        self.lifetime = Handoff()
        self.grant: Grant | None = None

    async def receive(self, receivers: ReceiverSet, timeout_s: float) -> Seal:
        """The verified seal. Raises TransferFailed or DeadlineExceeded: nothing that arrived may be used."""
        assert self.grant is not None, self.id
        self.lifetime.advance(HandoffState.RECEIVING)
        seal = await receivers.wait_sealed(self.id, timeout_s)
        if not seal.first_tokens:
            raise TransferFailed("the seal has no first token")
        self.lifetime.advance(HandoffState.SEALED)
        return seal

    async def cancel(self, receivers: ReceiverSet) -> bool:
        """Stop receiving. True once nothing writes into the granted blocks any more."""
        is_receiving = self.lifetime.state in (HandoffState.GRANTED, HandoffState.RECEIVING)
        if self.grant is None or not is_receiving:
            return True
        return await receivers.cancel(self.id)
