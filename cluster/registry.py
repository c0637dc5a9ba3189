"""Who is alive: one expiring row a worker, renewed each second by the worker itself.

Redis is authoritative for nothing that a worker can tell by itself: a lost row comes back with the next renewal.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec
from redis.exceptions import RedisError

from cluster.store import Store
from core.ids import WorkerId
from core.load import Load
from core.worker import WorkerRecord

logger = logging.getLogger(__name__)
LEASE_S = 3
RENEW_S = 1.0
MAX_EVENTS = 2000
MAX_SIZE = 1 << 31
MAX_IGNORED = 1000
_RECORD = b"record"
_EPOCH = b"epoch"


class Registry:
    """The readers' side."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ignored: set[bytes] = set()

    async def workers(self) -> list[WorkerRecord] | None:
        """Every registered worker, or None when Redis does not answer. A row that is not what a worker of that id
        would write is skipped, and that said once."""
        rows = await self._store.call(self._read_rows, operation="workers")
        if rows is None:
            return None
        return [record for member, row in rows.items() if (record := self._decode(member, row)) is not None]

    async def loads(self, worker_ids: list[WorkerId]) -> dict[WorkerId, Load] | None:
        """The published loads, for those that only read (operators' tools); sessions carry fresher ones."""
        keys = self._store.keys

        async def read(redis: Any) -> list[bytes | None]:
            async with redis.pipeline(transaction=False) as pipe:
                for worker_id in worker_ids:
                    pipe.hget(keys.load(worker_id), "load")
                values: list[bytes | None] = await pipe.execute()
                return values

        values = await self._store.call(read, operation="loads")
        if values is None:
            return None
        pairs = zip(worker_ids, values, strict=True)
        loads = {worker_id: _decode_load(value) for worker_id, value in pairs}
        return {worker_id: load for worker_id, load in loads.items() if load is not None}

    async def _read_rows(self, redis: Any) -> dict[bytes, Any]:
        """The rows of all members; members without a row have expired and are dropped from the set."""
        prefix = self._store.keys.worker(WorkerId("")).encode()
        members = sorted(await redis.smembers(self._store.keys.workers))
        async with redis.pipeline(transaction=False) as pipe:
            for member in members:
                pipe.hgetall(prefix + member)
            rows = dict(zip(members, await pipe.execute(raise_on_error=False), strict=True))
        gone = [member for member, row in rows.items() if row == {}]
        if gone:
            await redis.srem(self._store.keys.workers, *gone)
        return {member: row for member, row in rows.items() if row != {}}

    def _decode(self, member: bytes, row: Any) -> WorkerRecord | None:
        """A row's record, checked field by field; None for anything else that stands there."""
        try:
            if isinstance(row, Exception):
                raise row
            record = msgspec.json.decode(row.get(_RECORD, b""), type=WorkerRecord)
            _check(record, member)
        except (msgspec.MsgspecError, RedisError, ValueError) as error:
            if member not in self._ignored and len(self._ignored) < MAX_IGNORED:
                self._ignored.add(member)
                logger.warning("ignored the row of worker %r: %s", member, error)
            return None
        self._ignored.discard(member)
        return record


class Registration:
    """One worker's presence. `run()` renews it until cancelled; `leave()` removes it at once. `record` is replaced
    when the worker takes a new epoch."""

    def __init__(
        self,
        store: Store,
        record: WorkerRecord,
        read_load: Callable[[], Load],
        on_return: Callable[[], Awaitable[None]],
    ) -> None:
        """`on_return` is awaited when the row had to be made anew: what else this worker published is gone too."""
        self._store = store
        self.record = record
        self._read_load = read_load
        self._on_return = on_return
        self._sequence = 0

    async def run(self) -> None:
        while True:
            was_there = await self._store.call(self._renew, operation="renew")
            if was_there is False:
                await self._store.call(lambda redis: self._tell(redis, "joined"), operation="events")
                await self._on_return()
            await asyncio.sleep(RENEW_S)

    async def leave(self) -> None:
        """Deregister. What Redis does not hear expires by itself."""
        await self._store.call(self._remove, operation="leave")
        await self._store.call(lambda redis: self._tell(redis, "left"), operation="events")

    async def _renew(self, redis: Any) -> bool:
        """Write row and load with their expiry; True when the row of this epoch was still there."""
        keys, record = self._store.keys, self.record
        self._sequence += 1
        load = replace(self._read_load(), sequence=self._sequence)
        async with redis.pipeline(transaction=True) as pipe:
            pipe.hget(keys.worker(record.worker_id), _EPOCH)
            pipe.hset(keys.worker(record.worker_id), mapping=_encode(record))
            pipe.expire(keys.worker(record.worker_id), LEASE_S)
            pipe.hset(keys.load(record.worker_id), "load", msgspec.json.encode(load))
            pipe.expire(keys.load(record.worker_id), LEASE_S)
            pipe.sadd(keys.workers, record.worker_id)
            previous, *_ = await pipe.execute()
        return bool(previous == str(record.epoch).encode())

    async def _remove(self, redis: Any) -> None:
        keys, worker_id = self._store.keys, self.record.worker_id
        await redis.delete(keys.worker(worker_id), keys.load(worker_id))
        await redis.srem(keys.workers, worker_id)

    async def _tell(self, redis: Any, kind: str) -> None:
        fields = {"event": kind, "worker_id": self.record.worker_id, "epoch": self.record.epoch}
        await redis.xadd(self._store.keys.events, fields, maxlen=MAX_EVENTS, approximate=True)


def _encode(record: WorkerRecord) -> dict[str, bytes]:
    return {
        "epoch": str(record.epoch).encode(),
        "role": record.role.encode(),
        "record": msgspec.json.encode(record),
    }


def _check(record: WorkerRecord, member: bytes) -> None:
    """Raises ValueError for a record that types allow and a worker never writes."""
    if record.worker_id.encode() != member:
        raise ValueError(f"it is about {record.worker_id}")
    spec = record.kv_spec
    sizes = (spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.block_size, record.context_len)
    if min(*sizes, record.vocab_size, record.num_blocks, record.max_batch) <= 0:
        raise ValueError("a size is not positive")
    if record.max_local_tokens < 0:
        raise ValueError("max_local_tokens is negative")
    if max(*sizes, record.vocab_size, record.num_blocks, record.max_batch) >= MAX_SIZE:
        raise ValueError("a size is absurd")
    host, _, port = record.address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"the address {record.address!r} is not host:port")


def _decode_load(value: bytes | None) -> Load | None:
    try:
        return msgspec.json.decode(value, type=Load) if value else None
    except msgspec.MsgspecError:
        return None
