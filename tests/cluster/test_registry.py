"""Who is alive, as Redis says it: leases, loss, and rows that no worker wrote."""

import asyncio
import pickle
from dataclasses import replace

import msgspec
import pytest

from cluster.registry import Registration, Registry
from core.ids import WorkerId
from core.load import Load
from core.worker import Role


class Worker:
    """A registered worker that counts how often it was told that its rows were lost."""

    def __init__(self, redis, record):
        self.record = record
        self.load = Load(num_blocks=64, num_free_blocks=9, blocks_by_state={"free": 9})
        self.num_returns = 0
        self.registration = Registration(redis.store(), record, lambda: self.load, self._on_return)

    async def _on_return(self) -> None:
        self.num_returns += 1


@pytest.fixture
def join(redis, background):
    def start(record):
        worker = Worker(redis, record)
        worker.task = background(worker.registration.run())
        return worker

    return start


async def ids(registry: Registry) -> list[str]:
    return [record.worker_id for record in await registry.workers() or []]


async def test_two_workers_are_found_whole_with_their_loads(redis, join, record_of, eventually):
    records = [record_of("decode-0", 7), record_of("prefill-0", 8, Role.PREFILL)]
    for record in records:
        join(record)
    registry = Registry(redis.store())
    await eventually(lambda: _has(registry, 2))
    assert await registry.workers() == records
    loads = await registry.loads([WorkerId("decode-0"), WorkerId("nobody"), WorkerId("prefill-0")])
    assert sorted(loads) == ["decode-0", "prefill-0"]
    assert replace(loads["decode-0"], sequence=0) == Load(64, 9, blocks_by_state={"free": 9})
    assert loads["decode-0"].sequence >= 1


async def _has(registry: Registry, count: int) -> bool:
    return len(await ids(registry)) == count


async def test_a_worker_that_stops_renewing_is_gone_after_its_lease_and_one_that_leaves_at_once(
    redis, join, record_of, eventually
):
    dead, leaver, stayer = (join(record_of(name)) for name in ("dead", "leaver", "stayer"))
    registry = Registry(redis.store())
    await eventually(lambda: _has(registry, 3))
    leaver.task.cancel()
    await asyncio.wait([leaver.task])
    await leaver.registration.leave()
    assert await ids(registry) == ["dead", "stayer"]
    dead.task.cancel()
    await eventually(lambda: _has(registry, 1))
    assert await ids(registry) == ["stayer"]
    members = await redis.store().redis.smembers("tandem:{tests}:workers")
    assert members == {b"stayer"}
    assert stayer.num_returns == 1


async def _returned(worker, num_times):
    return worker.num_returns == num_times


async def test_after_a_flush_a_worker_registers_again_and_is_told_that_its_rows_are_gone(
    redis, join, record_of, eventually
):
    worker = join(record_of("decode-0"))
    registry = Registry(redis.store())
    await eventually(lambda: _has(registry, 1))
    await redis.store().redis.flushall()
    assert await ids(registry) == []
    await eventually(lambda: _returned(worker, 2))
    assert await ids(registry) == ["decode-0"]
    events = await redis.store().redis.xrange("tandem:{tests}:events")
    assert [fields[b"event"] for _, fields in events] == [b"joined"]


async def test_after_a_restart_of_redis_a_worker_registers_again(redis, join, record_of, eventually):
    join(record_of("decode-0"))
    registry = Registry(redis.store())
    await eventually(lambda: _has(registry, 1))
    await redis.restart()
    await eventually(lambda: _has(registry, 1))


async def test_without_redis_the_registry_knows_nothing_rather_than_nobody(redis):
    registry = Registry(redis.store())
    await redis.server.stop()
    assert await registry.workers() is None
    assert await registry.loads([WorkerId("decode-0")]) is None


async def test_a_restarted_worker_replaces_its_row(redis, join, record_of, eventually):
    old = join(record_of("decode-0", 1))
    registry = Registry(redis.store())
    await eventually(lambda: _has(registry, 1))
    old.task.cancel()
    await asyncio.wait([old.task])
    new = join(record_of("decode-0", 2))

    async def is_new() -> bool:
        return [record.epoch for record in await registry.workers()] == [2]

    await eventually(is_new)
    assert new.num_returns == 1, "another incarnation's row is not its own"


class Marker:
    """Unpickling it would be seen."""

    was_run = False

    def __reduce__(self):
        return setattr, (Marker, "was_run", True)


def broken_rows(record):
    good = msgspec.to_builtins(record)
    spec = good["kv_spec"]
    json = msgspec.json.encode
    yield "empty", b""
    yield "text", b"hello"
    yield "pickle", pickle.dumps(Marker())
    yield "a list", b"[]"
    yield "deep", b"[" * 100_000
    yield "no field", json({key: value for key, value in good.items() if key != "epoch"})
    yield "a wrong type", json({**good, "epoch": "1"})
    yield "a role", json({**good, "role": "admin"})
    yield "another's", json({**good, "worker_id": "decode-0"})
    for name in ("num_blocks", "max_batch", "context_len", "vocab_size"):
        yield f"no {name}", json({**good, name: 0})
    for name in ("block_size", "head_dim", "num_layers"):
        yield f"no {name}", json({**good, "kv_spec": {**spec, name: -16}})
    yield "a dtype", json({**good, "kv_spec": {**spec, "dtype": "int4"}})


async def test_rows_that_no_worker_wrote_are_skipped_and_told_once(
    redis, join, record_of, eventually, caplog
):
    join(record_of("decode-0"))
    client = redis.store().redis
    names = []
    for index, (name, value) in enumerate(broken_rows(record_of("x"))):
        worker_id = f"x{index}"
        value = value.replace(b'"worker_id":"x"', f'"worker_id":"{worker_id}"'.encode())
        names.append(name)
        await client.hset(f"tandem:{{tests}}:worker:{worker_id}", mapping={"record": value})
        await client.sadd("tandem:{tests}:workers", worker_id)
    for worker_id in (b"\xff\xfe", b"a string"):
        await client.set(b"tandem:{tests}:worker:" + worker_id, b"not a hash")
        await client.sadd("tandem:{tests}:workers", worker_id)
    await client.hset("tandem:{tests}:worker:no-record", "epoch", "x")
    await client.sadd("tandem:{tests}:workers", "no-record")
    registry = Registry(redis.store())
    await eventually(lambda: _has(registry, 1))
    for _ in range(3):
        assert await ids(registry) == ["decode-0"]
    assert not Marker.was_run
    ignored = [record for record in caplog.records if "ignored the row" in record.message]
    assert len(ignored) == len(names) + 3


async def test_a_crafted_epoch_in_its_own_row_does_not_end_a_workers_registration(
    redis, join, record_of, eventually
):
    worker = join(record_of("decode-0"))
    registry = Registry(redis.store())
    await eventually(lambda: _has(registry, 1))
    await redis.store().redis.hset("tandem:{tests}:worker:decode-0", "epoch", "nonsense")

    async def was_told() -> bool:
        return worker.num_returns == 2

    await eventually(was_told)
    assert not worker.task.done()


async def test_a_crafted_load_is_skipped(redis, join, record_of, eventually):
    client = redis.store().redis
    await client.hset("tandem:{tests}:load:a", "load", b'{"num_blocks": "many"}')
    await client.hset("tandem:{tests}:load:b", "load", b'{"num_blocks": 5}')
    loads = await Registry(redis.store()).loads([WorkerId("a"), WorkerId("b")])
    assert loads == {WorkerId("b"): Load(num_blocks=5)}


async def test_a_set_of_workers_that_is_no_set_leaves_the_last_view(redis, caplog):
    store = redis.store()
    await store.redis.set("tandem:{tests}:workers", "x")
    for _ in range(5):
        assert await Registry(store).workers() is None
    assert store.is_up
    assert len(caplog.records) == 1
