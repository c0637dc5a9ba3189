"""A worker's own grants: which of its blocks a peer may write, for one handoff. Knows nothing of engines."""

from collections.abc import Sequence
from dataclasses import dataclass

from core.grant import Grant, GrantSigner
from core.ids import BlockId, Epoch, HandoffId, WorkerId
from kv_transfer.connectors import ReceiverSet


@dataclass(frozen=True, slots=True)
class Granter:
    """Makes this worker's grants. The key lives and dies with the epoch."""

    worker_id: WorkerId
    epoch: Epoch
    signer: GrantSigner
    receivers: ReceiverSet

    def grant(
        self, handoff_id: HandoffId, num_tokens: int, num_cached_tokens: int, block_ids: Sequence[BlockId]
    ) -> Grant:
        """A signed grant of `block_ids`, for those of `num_tokens` tokens that follow the `num_cached_tokens`."""
        unsigned = Grant(
            handoff_id=handoff_id,
            worker_id=self.worker_id,
            epoch=self.epoch,
            num_prompt_tokens=num_tokens,
            num_cached_tokens=num_cached_tokens,
            block_ids=tuple(block_ids),
            addresses=tuple(self.receivers.addresses),
        )
        return self.signer.sign(unsigned)
