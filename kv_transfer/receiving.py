"""What a worker has granted and what became of it: one table for all its connectors. Knows nothing of connections.

    expect(grant) ─► a Landing ─► admit(Open) ─► wait_sealed() verified ─► retired
                         └─────────────┴──────── cancel() ─► quiet ──────► retired

A retired handoff leaves a tombstone, so that a late or repeated attempt of it is refused as over.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from core.clock import Clock, monotonic
from core.errors import DeadlineExceeded, StaleEpoch, TransferFailed
from core.grant import Grant, Seal
from core.ids import BlockHash, HandoffId
from core.kv_region import KVRegion
from kv_transfer.base import Identity
from kv_transfer.landing import Landing, LandingState
from kv_transfer.messages import Open, grant_digest

VerifyGrant = Callable[[Grant], bool]
_TOMBSTONE_S = 3600.0


class GrantTable:
    """Every handoff that this worker expects or is not yet done with. Lives on one event loop."""

    def __init__(
        self,
        region: KVRegion,
        identity: Identity,
        verify: VerifyGrant,
        grace_s: float,
        clock: Clock = monotonic,
    ) -> None:
        self.region = region
        self.identity = identity
        self._verify = verify
        self._grace_s = grace_s
        self._clock = clock
        self._live: dict[HandoffId, Landing] = {}
        self._tombstones: OrderedDict[HandoffId, float] = OrderedDict()
        self._checks: set[asyncio.Future[None]] = set()
        self._scratch = bytearray()

    def renew(self, identity: Identity, verify: VerifyGrant) -> None:
        """See ReceiverSet.renew."""
        self.identity, self._verify = identity, verify

    def expect(self, grant: Grant, chain_hash: BlockHash | None) -> None:
        """See ReceiverSet.expect."""
        assert (grant.worker_id, grant.epoch) == (self.identity.worker_id, self.identity.epoch), grant
        assert grant.handoff_id not in self._live, f"{grant.handoff_id} is already expected"
        assert all(0 <= block < self.region.num_blocks for block in grant.block_ids), grant.block_ids
        if grant.handoff_id in self._tombstones:
            raise StaleEpoch(f"{grant.handoff_id} is over")
        self._live[grant.handoff_id] = Landing(grant, self.region, chain_hash)

    def admit(self, request: Open) -> Landing:
        """The landing that a peer asks to write. Raises StaleEpoch or TransferFailed; then nothing has changed."""
        if request.epoch != self.identity.epoch:
            raise StaleEpoch(f"epoch {request.epoch} granted, epoch {self.identity.epoch} now")
        landing = self._live.get(request.handoff_id)
        if landing is None:
            state = "over" if request.handoff_id in self._tombstones else "not expected"
            raise StaleEpoch(f"{request.handoff_id} is {state}")
        if not self._verify(replace(landing.grant, mac=request.mac)):
            raise TransferFailed(f"{request.handoff_id}: the grant's signature is not ours")
        if request.content != grant_digest(landing.grant):
            raise TransferFailed(f"{request.handoff_id}: not the grant that was given")
        if landing.state is not LandingState.EXPECTED:
            raise TransferFailed(f"{request.handoff_id} is already {landing.state}")
        return landing

    async def wait_sealed(self, handoff_id: HandoffId, timeout_s: float) -> Seal:
        """See ReceiverSet.wait_sealed."""
        landing = self._live.get(handoff_id)
        if landing is None:
            raise TransferFailed(f"{handoff_id} is not expected")
        try:
            async with asyncio.timeout(timeout_s):
                seal = await landing.settled()
                landing.check_seal(seal)
                await self._check_digests(landing, seal)
                await landing.settled()  # cancelled meanwhile?
        except TimeoutError as error:
            raise DeadlineExceeded(f"{handoff_id}: not sealed within {timeout_s} s") from error
        self._retire(handoff_id)
        return seal

    async def cancel(self, handoff_id: HandoffId) -> bool:
        """See ReceiverSet.cancel."""
        landing = self._live.get(handoff_id)
        if landing is None:
            self._bury(handoff_id)
            return True
        landing.cancel()
        try:
            async with asyncio.timeout(self._grace_s):
                await self.wait_quiet(handoff_id)
        except TimeoutError:
            return False
        return True

    async def wait_quiet(self, handoff_id: HandoffId) -> None:
        """See ReceiverSet.wait_quiet."""
        landing = self._live.get(handoff_id)
        if landing is not None:
            await landing.wait_quiet()
            self._retire(handoff_id)

    async def close(self) -> None:
        """Cancel everything; afterwards no thread of this process reads or writes the region for a transfer."""
        for landing in self._live.values():
            landing.cancel()
        await asyncio.gather(*self._checks, return_exceptions=True)

    def scratch(self, num_bytes: int) -> memoryview:
        """Room for bytes that nobody reads, shared by all."""
        if len(self._scratch) < num_bytes:
            self._scratch = bytearray(num_bytes)
        return memoryview(self._scratch)[:num_bytes]

    async def _check_digests(self, landing: Landing, seal: Seal) -> None:
        loop = asyncio.get_running_loop()
        check = loop.run_in_executor(None, landing.check_digests, seal)
        self._checks.add(check)
        check.add_done_callback(self._check_ended)
        await asyncio.shield(check)

    def _check_ended(self, check: asyncio.Future[None]) -> None:
        self._checks.discard(check)
        if not check.cancelled():
            check.exception()  # retrieved here as well: the waiter may have met its deadline

    def _retire(self, handoff_id: HandoffId) -> None:
        self._live.pop(handoff_id, None)
        self._bury(handoff_id)

    def _bury(self, handoff_id: HandoffId) -> None:
        now = self._clock()
        self._tombstones[handoff_id] = now + _TOMBSTONE_S
        self._tombstones.move_to_end(handoff_id)
        while next(iter(self._tombstones.values())) <= now:
            self._tombstones.popitem(last=False)
