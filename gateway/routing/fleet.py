"""The workers this gateway knows: found in the registry, talked to over one session each. Keeps its last view while
the registry is silent; an open session outranks an expired registration."""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from cluster.registry import Registry
from core.block_hash import HASH_BLOCK_TOKENS
from core.clock import loop_time
from core.ids import Epoch, WorkerId, new_request_id
from core.load import Load
from core.worker import Role, WorkerRecord
from gateway.routing.commands import clear_cache
from gateway.routing.link import RECONNECT_S, OpenSession, WorkerLink, open_grpc_session
from gateway.routing.prefix_index import PrefixIndex
from gateway.routing.worker_table import WorkerRow, WorkerTable

logger = logging.getLogger(__name__)
POLL_S = 0.5
MAX_RECONNECT_S = 2.0
MAX_GONE = 32
WorkerKey = tuple[WorkerId, Epoch]


@dataclass(frozen=True, slots=True)
class Gone:
    """A worker that left, when, on the loop's clock, and why its last session ended."""

    record: WorkerRecord
    at_s: float
    reason: str


class Fleet:
    """Owns the links. `run()` follows the registry until cancelled."""

    def __init__(
        self,
        registry: Registry,
        model_id: str,
        prefixes: PrefixIndex,
        open_session: OpenSession = open_grpc_session,
    ) -> None:
        self._registry = registry
        self._model_id = model_id
        self._prefixes = prefixes
        self._open_session = open_session
        self._reference: WorkerRecord | None = None
        self._gateway_id = f"gateway-{new_request_id()[:8]}"
        self.tables = {role: WorkerTable() for role in Role}
        self._links: dict[WorkerKey, WorkerLink] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._registered: set[WorkerKey] = set()
        self._refused: set[WorkerKey] = set()
        self._changed = asyncio.Event()
        self.gone: deque[Gone] = deque(maxlen=MAX_GONE)

    @property
    def gateway_id(self) -> str:
        """Another one each time that the gateway starts."""
        return self._gateway_id

    @property
    def links(self) -> list[WorkerLink]:
        return list(self._links.values())

    def link(self, record: WorkerRecord) -> WorkerLink:
        """The link to a worker that a table has just named."""
        return self._links[record.key]

    def find(self, record: WorkerRecord) -> WorkerLink | None:
        """The same for one that may have gone since."""
        return self._links.get(record.key)

    def candidates(self, role: Role) -> list[WorkerRow]:
        """The workers of a tier whose session is up, but for those that want nothing new."""
        return [row for row in self.tables[role].rows if row.is_open]

    @property
    def draining(self) -> set[WorkerId]:
        """Those that still have work and want nothing new."""
        return {link.record.worker_id for link in self._links.values() if link.load.is_draining}

    @property
    def fingerprint(self) -> str:
        """The content identity of the model served; empty until a worker is known."""
        return self._reference.kv_spec.fingerprint if self._reference is not None else ""

    @property
    def block_size(self) -> int:
        """Tokens of a block in all pools; that of a hash block until a worker is known."""
        return self._reference.kv_spec.block_size if self._reference is not None else HASH_BLOCK_TOKENS

    @property
    def is_ready(self) -> bool:
        """Both tiers can be reached, or a decode worker that needs no prefill tier."""
        decode = self.candidates(Role.DECODE)
        has_prefill = bool(self.candidates(Role.PREFILL)) or any(c.record.is_colocated for c in decode)
        return bool(decode) and has_prefill

    def clear_caches(self) -> tuple[list[WorkerId], list[WorkerId]]:
        """Tell every worker to forget what it has cached: who was told, and who could not be reached."""
        told: list[WorkerId] = []
        missed: list[WorkerId] = []
        for link in self.links:
            if link.is_up:
                link.send(clear_cache(link.record.role))
            (told if link.is_up else missed).append(link.record.worker_id)
        return sorted(told), sorted(missed)

    async def wait_ready(self) -> None:
        while not self.is_ready:
            self._changed.clear()
            await self._changed.wait()

    async def run(self) -> None:
        """Look for workers every POLL_S; a silent registry leaves the view as it is."""
        try:
            while True:
                await self._look()
                await asyncio.sleep(POLL_S)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _look(self) -> None:
        try:
            records = await self._registry.workers()
            if records is not None:
                self._follow(records)
        except Exception:
            logger.exception("looking for workers failed")

    def _follow(self, records: Iterable[WorkerRecord]) -> None:
        usable = {record.key: record for record in records if self._is_usable(record)}
        self._registered = set(usable)
        for key, record in usable.items():
            if key not in self._links:
                row = self.tables[record.role].add(record)
                self._links[key] = WorkerLink(row, self._gateway_id, self._open_session)
                self._prefixes.follow(record)
                task = asyncio.create_task(self._keep(key))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _is_usable(self, record: WorkerRecord) -> bool:
        """One model a gateway: workers of another are not ours."""
        return record.model == self._model_id and self._fits(record)

    def _fits(self, record: WorkerRecord) -> bool:
        """The first worker that answers decides which weights and which pool geometry the model's id stands for; one
        that differs is refused, said once with both values."""
        if self._reference is None:
            return True
        mismatch = self._reference.kv_spec.mismatch(record.kv_spec)
        if mismatch is not None and record.key not in self._refused:
            self._refused.add(record.key)
            logger.error(
                "refused %s, it does not fit %s: %s", record.worker_id, self._reference.worker_id, mismatch
            )
        return mismatch is None

    async def _keep(self, key: WorkerKey) -> None:
        """Hold a session with one incarnation, reconnecting while it is registered. Each session's end is told, and
        once why none can be had."""
        told = ""
        pause_s = RECONNECT_S
        while True:
            link = self._links[key]
            reason = await self._hold(link)
            self._changed.set()
            if link.was_up or reason != told:
                told = reason
                logger.warning("no session with %s: %s", link.record.worker_id, reason)
            if key not in self._registered:
                break
            pause_s = RECONNECT_S if link.was_up else min(2 * pause_s, MAX_RECONNECT_S)
            await asyncio.sleep(pause_s)
            link.row.publish(Load())  # what it told in the last session is not known any more
            self._links[key] = WorkerLink(link.row, self._gateway_id, self._open_session)
        link = self._links.pop(key)
        self.tables[link.record.role].remove(link.row)
        self.gone.append(Gone(link.record, loop_time(), told))
        if not self._links:
            self._reference = None
        await self._prefixes.leave(link.record)

    async def _hold(self, link: WorkerLink) -> str:
        """One session from beginning to end; why it ended."""
        watch = asyncio.create_task(self._notice(link))
        try:
            return await link.run()
        except Exception as error:
            logger.exception("the session with %s failed", link.record.worker_id)
            return repr(error)
        finally:
            watch.cancel()

    async def _notice(self, link: WorkerLink) -> None:
        await link.up.wait()
        if self._reference is None:
            self._reference = link.record
            for other in self._links.values():
                other.row.set_fitting(self._fits(other.record))
        self._changed.set()
