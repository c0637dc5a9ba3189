"""Rows that operators look at: which handoffs are live and where. Written in batches that no request waits for."""

import asyncio
import contextlib
from functools import partial
from typing import Any

from cluster.store import Store
from core.clock import loop_time
from core.ids import HandoffId

FLUSH_S = 0.1
ROW_LIFETIME_S = 60


class HandoffRows:
    """One gateway's live handoffs. A row exists from soon after its handoff began until soon after its end."""

    def __init__(self, store: Store, refresh_s: float = ROW_LIFETIME_S / 2) -> None:
        """The rows of live handoffs are written anew every `refresh_s`, before they expire."""
        self._store = store
        self._refresh_s = refresh_s
        self._live: dict[HandoffId, dict[str, str]] = {}
        self._changed: set[HandoffId] = set()
        self._written: set[HandoffId] = set()
        self._wake = asyncio.Event()

    def update(
        self, handoff_id: HandoffId, state: str, prefill_worker_id: str, decode_worker_id: str
    ) -> None:
        self._live[handoff_id] = {"state": state, "prefill": prefill_worker_id, "decode": decode_worker_id}
        self._touch(handoff_id)

    def remove(self, handoff_id: HandoffId) -> None:
        self._live.pop(handoff_id, None)
        self._touch(handoff_id)

    def _touch(self, handoff_id: HandoffId) -> None:
        self._changed.add(handoff_id)
        self._wake.set()

    async def run(self) -> None:
        """Write until cancelled. A change that Redis did not take stays due, the latest state of it only."""
        refresh_at_s = loop_time() + self._refresh_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(refresh_at_s):
                    await self._wake.wait()
            if loop_time() >= refresh_at_s:
                refresh_at_s = loop_time() + self._refresh_s
                self._changed.update(self._live)
            self._wake.clear()
            due, self._changed = self._changed, set()
            if due and not await self._store.call(partial(self._write, due=due), operation="handoff_rows"):
                self._changed |= due
                self._wake.set()
            await asyncio.sleep(FLUSH_S)

    async def _write(self, redis: Any, due: set[HandoffId]) -> bool:
        deleted: set[HandoffId] = set()
        async with redis.pipeline(transaction=False) as pipe:
            for handoff_id in due:
                key = self._store.keys.handoff(handoff_id)
                row = self._live.get(handoff_id)
                if row is not None:
                    pipe.hset(key, mapping=row)
                    pipe.expire(key, ROW_LIFETIME_S)
                    self._written.add(handoff_id)
                elif handoff_id in self._written:
                    pipe.delete(key)
                    deleted.add(handoff_id)
            await pipe.execute()
        self._written -= deleted
        return True
