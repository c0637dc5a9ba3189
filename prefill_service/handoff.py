"""The prefill side of one handoff: what its engine has computed, and sending it. Knows nothing of gRPC or sessions.

computed blocks  [ ready, sent | ready | not yet computed ]      of those the grant asks for
                   position ────►
"""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from core.clock import loop_time
from core.errors import TransferFailed
from core.grant import Grant, Seal
from core.handoff import Handoff, HandoffState
from core.ids import BlockId, HandoffId
from engine.messages import First
from kv_transfer.base import Identity, KVTransfer, Run, runs_of
from kv_transfer.connectors import SenderSet, scheme_of
from kv_transfer.faults import FaultySender


class Delivered(NamedTuple):
    """What crossed for one handoff."""

    num_bytes: int
    connector: str


class PrefillHandoff:
    """Fed by the engine's events; `deliver()` is the life of its transfer. One task runs it. `send_s` is how long it
    has taken while there was something to send, over `connector`."""

    def __init__(
        self, handoff_id: HandoffId, num_prompt_tokens: int, num_output_tokens: int, block_size: int
    ) -> None:
        self.id = handoff_id
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = num_prompt_tokens + num_output_tokens
        self._block_size = block_size
        self._block_ids: list[BlockId] = []
        self._num_computed = 0
        self._first: First | None = None
        self._changed = asyncio.Event()
        self._transfer: KVTransfer | None = None
        self.connector = ""
        self.send_s = 0.0
        self.lifetime = Handoff()

    def started(self, block_ids: list[BlockId], num_cached_tokens: int, num_tokens: int) -> None:
        self._block_ids = block_ids
        self.num_tokens = num_tokens
        self.computed(num_cached_tokens)

    def computed(self, num_tokens: int) -> None:
        self._num_computed = num_tokens
        self._changed.set()

    def sampled(self, first: First) -> None:
        self._first = first
        self._changed.set()

    async def deliver(
        self, grant: Grant, senders: SenderSet | FaultySender, identity: Identity
    ) -> Delivered | None:
        """Send the granted blocks as they are computed, then the seal. None when the first token ended the request:
        then there is no seal, decode must not go on. Raises TransferFailed."""
        self._check(grant)
        address = senders.choose(grant.addresses)
        self.connector = scheme_of(address)
        opened = self._transfer = await senders.open(grant, address)
        self.lifetime.advance(HandoffState.RECEIVING)
        position = 0
        while position < len(grant.block_ids):
            num_ready = await self._wait_ready(grant, position)
            with self._sending():
                await opened.send(list(self._runs(grant, position, num_ready)))
            position = num_ready
        first = await self._wait_first()
        if all(token.is_finished for token in first.first_tokens):
            return None
        with self._sending():
            await opened.seal(self._make_seal(first, grant, identity, self.connector))
        if self.lifetime.state is HandoffState.RECEIVING:  # its verification may have been heard of already
            self.lifetime.advance(HandoffState.SEALED)
        return Delivered(opened.num_bytes_sent, self.connector)

    @property
    def num_bytes_sent(self) -> int:
        return self._transfer.num_bytes_sent if self._transfer is not None else 0

    @contextlib.contextmanager
    def _sending(self) -> Iterator[None]:
        began_s = loop_time()
        try:
            yield
        finally:
            self.send_s += loop_time() - began_s

    def released(self) -> None:
        """Its seal was verified."""
        if self.lifetime.state is HandoffState.RECEIVING:
            self.lifetime.advance(HandoffState.SEALED)
        self.lifetime.end(
            HandoffState.FINISHED if self.lifetime.state is HandoffState.SEALED else HandoffState.ABORTED
        )

    async def cancel(self) -> bool:
        """Stop sending. True once nothing of it touches any pool."""
        return self._transfer is None or await self._transfer.cancel()

    def _check(self, grant: Grant) -> None:
        """Raises TransferFailed unless the grant asks for exactly the blocks of this prompt after the cached ones."""
        num_cached, rest = divmod(grant.num_cached_tokens, self._block_size)
        num_blocks = -(-self.num_tokens // self._block_size) - num_cached
        if (grant.num_prompt_tokens, rest, len(grant.block_ids)) != (self.num_tokens, 0, num_blocks):
            raise TransferFailed(f"{self.id}: the grant is not for a prompt of {self.num_tokens} tokens")

    async def _wait_ready(self, grant: Grant, position: int) -> int:
        """How many of the grant's blocks can be sent, once that is more than `position`."""
        while (num_ready := self._num_ready(grant)) <= position:
            await self._wait_change()
        return num_ready

    def _num_ready(self, grant: Grant) -> int:
        if self._num_computed >= self.num_tokens:
            return len(grant.block_ids)
        return max(0, (self._num_computed - grant.num_cached_tokens) // self._block_size)

    def _runs(self, grant: Grant, position: int, end: int) -> Iterator[Run]:
        skip = grant.num_cached_tokens // self._block_size
        return runs_of(self._block_ids[skip + position : skip + end], position)

    async def _wait_first(self) -> First:
        while self._first is None:
            await self._wait_change()
        return self._first

    def _make_seal(self, first: First, grant: Grant, identity: Identity, connector: str) -> Seal:
        return Seal(
            handoff_id=self.id,
            prefill_worker_id=identity.worker_id,
            prefill_epoch=identity.epoch,
            decode_epoch=grant.epoch,
            num_tokens=self.num_tokens,
            chain_hash=first.chain_hash,
            first_tokens=tuple(first.first_tokens),
            connector=connector,
        )

    async def _wait_change(self) -> None:
        await self._changed.wait()
        self._changed.clear()
