"""Who is alive: one expiring row a worker, renewed each second by the worker itself.

Redis is authoritative for nothing that a worker can tell by itself: a lost row comes back with the next renewal.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec

from cluster.store import Store
from core.ids import WorkerId
from core.load import Load
from core.worker import WorkerRecord

logger = logging.getLogger(__name__)
LEASE_S = 3
RENEW_S = 1.0
MAX_EVENTS = 10_000
_RECORD = b"record"
_EPOCH = b"epoch"


class Registry:
    """The readers' side."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def workers(self) -> list[WorkerRecord] | None:
        """Every registered worker, or None when Redis does not answer. Rows that do not decode are skipped."""
        rows = await self._store.call(self._read_rows)
        if rows is None:
            return None
        return [record for row in rows if (record := _decode(row)) is not None]

    async def loads(self, worker_ids: list[WorkerId]) -> dict[WorkerId, Load] | None:
        """The published loads, for those that only read (operators' tools); sessions carry fresher ones."""
        keys = self._store.keys

        async def read(redis: Any) -> list[bytes | None]:
            async with redis.pipeline(transaction=False) as pipe:
                for worker_id in worker_ids:
                    pipe.hget(keys.load(worker_id), "load")
                values: list[bytes | None] = await pipe.execute()
                return values

        values = await self._store.call(read)
        if values is None:
            return None
        pairs = zip(worker_ids, values, strict=True)
        return {worker_id: msgspec.json.decode(value, type=Load) for worker_id, value in pairs if value}

    async def _read_rows(self, redis: Any) -> list[dict[bytes, bytes]]:
        """The rows of all members; members without a row have expired and are dropped from the set."""
        keys = self._store.keys
        ids = sorted(member.decode() for member in await redis.smembers(keys.workers))
        async with redis.pipeline(transaction=False) as pipe:
            for worker_id in ids:
                pipe.hgetall(keys.worker(WorkerId(worker_id)))
            rows: list[dict[bytes, bytes]] = await pipe.execute()
        gone = [worker_id for worker_id, row in zip(ids, rows, strict=True) if not row]
        if gone:
            await redis.srem(keys.workers, *gone)
        return [row for row in rows if row]


class Registration:
    """One worker's presence. `run()` renews it until cancelled; `leave()` removes it at once."""

    def __init__(
        self,
        store: Store,
        record: WorkerRecord,
        read_load: Callable[[], Load],
        on_return: Callable[[], Awaitable[None]],
    ) -> None:
        """`on_return` is awaited when the row had to be made anew: what else this worker published is gone too."""
        self._store = store
        self._record = record
        self._read_load = read_load
        self._on_return = on_return
        self._sequence = 0

    async def run(self) -> None:
        while True:
            was_there = await self._store.call(self._renew)
            if was_there is False:
                await self._store.call(lambda redis: self._tell(redis, "joined"))
                await self._on_return()
            await asyncio.sleep(RENEW_S)

    async def leave(self) -> None:
        """Deregister. What Redis does not hear expires by itself."""
        await self._store.call(self._remove)
        await self._store.call(lambda redis: self._tell(redis, "left"))

    async def _renew(self, redis: Any) -> bool:
        """Write row and load with their expiry; True when the row of this epoch was still there."""
        keys, record = self._store.keys, self._record
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
        return previous is not None and int(previous) == record.epoch

    async def _remove(self, redis: Any) -> None:
        keys, worker_id = self._store.keys, self._record.worker_id
        await redis.delete(keys.worker(worker_id), keys.load(worker_id))
        await redis.srem(keys.workers, worker_id)

    async def _tell(self, redis: Any, kind: str) -> None:
        fields = {"event": kind, "worker_id": self._record.worker_id, "epoch": self._record.epoch}
        await redis.xadd(self._store.keys.events, fields, maxlen=MAX_EVENTS, approximate=True)


def _encode(record: WorkerRecord) -> dict[str, bytes]:
    return {
        "epoch": str(record.epoch).encode(),
        "role": record.role.encode(),
        "record": msgspec.json.encode(record),
    }


def _decode(row: dict[bytes, bytes]) -> WorkerRecord | None:
    """A row's record, checked field by field; None (and a log line) for anything else that stands there."""
    try:
        return msgspec.json.decode(row.get(_RECORD, b""), type=WorkerRecord)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        logger.warning("ignored a worker row that does not decode: %s", error)
        return None
