"""Both directions of one worker: what it receives on, what it sends over, and the grants that it makes. Knows nothing
of engines or services."""

from core.grant import GrantSigner
from core.kv_region import KVRegion
from kv_transfer.base import Identity, TransferOptions
from kv_transfer.connectors import ReceiverSet, SenderSet, create_receivers, create_senders
from kv_transfer.faults import Faults, FaultySender, create_faulty_senders
from kv_transfer.granting import Granter

Senders = SenderSet | FaultySender


class Connections:
    """Lives as long as the worker, over all its incarnations: receivers go on watching who may still write, while
    key and senders are another incarnation's own."""

    def __init__(
        self,
        connector: str,
        region: KVRegion,
        identity: Identity,
        options: TransferOptions,
        faults: Faults | None = None,
    ) -> None:
        """With `faults`, what is sent suffers them. Raises ValueError when the connector is not one."""
        self._connector = connector
        self._region = region
        self._options = options
        self._faults = faults
        signer = GrantSigner()
        self.receivers: ReceiverSet = create_receivers([connector], region, identity, signer.verify, options)
        self._take(identity, signer)

    def _take(self, identity: Identity, signer: GrantSigner) -> None:
        self.identity = identity
        self.granter = Granter(identity.worker_id, identity.epoch, signer, self.receivers)
        self.senders: Senders = self._make_senders()

    async def start(self) -> None:
        """Listen. Raises OSError when an address cannot be bound."""
        await self.receivers.start()

    def renew(self, identity: Identity) -> Senders:
        """Be another incarnation's; the senders of the one before, for the caller to close."""
        earlier, signer = self.senders, GrantSigner()
        self.receivers.renew(identity, signer.verify)
        self._take(identity, signer)
        return earlier

    async def close(self) -> None:
        """Nothing of this process touches the region for a transfer afterwards."""
        await self.senders.close()
        await self.receivers.close()

    def _make_senders(self) -> Senders:
        wire = (self._connector, self._region, self.identity, self._options)
        return create_senders(*wire) if self._faults is None else create_faulty_senders(self._faults, *wire)
