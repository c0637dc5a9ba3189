"""Redis in every bad state it is known for: serving goes on, answers stay right, one line tells it, and when it is
well again workers and blocks are found in it."""

import asyncio
import os
import random
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import psutil
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from cluster.block_index import _HOLDER, TIER_POOL
from cluster.keys import Keys
from cluster.registry import LEASE_S
from core.block_hash import hash_chain
from core.ids import WorkerId
from core.worker import Role
from tandem.testing import LocalCluster
from tests.end_to_end.clients import Load, assert_well

pytestmark = pytest.mark.asyncio(loop_scope="module")
rng = random.Random(79)
WORKERS = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}
KEYS = Keys("default")
BEYOND_LEASE_S = LEASE_S + 1.0
DEAD_EPOCH = 4711


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(start_cluster) -> AsyncIterator[LocalCluster]:
    async with start_cluster() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def redis(cluster) -> AsyncIterator[Redis]:
    async with Redis.from_url(cluster.redis_url) as made:
        yield made


def new_prompt(_: int = 0) -> list[int]:
    return [rng.randrange(256) for _ in range(40)]


def log_of(cluster: LocalCluster, name: str) -> str:
    return cluster.processes[name].log.read_text()


async def eventually(holds: Callable[[], Awaitable[bool]], within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not await holds():
            await asyncio.sleep(0.05)


async def is_gone(redis: Redis, name: str, member: bytes) -> bool:
    return member not in await redis.smembers(name)


async def epochs(cluster: LocalCluster) -> set[int]:
    return {worker["record"]["epoch"] for worker in await cluster.workers()}


async def wait_found(cluster: LocalCluster, redis: Redis, prompt: list[int]) -> None:
    """Until every worker is registered and named as a holder of the prompt's first block."""
    fingerprint = (await cluster.workers())[0]["record"]["kv_spec"]["fingerprint"]
    row = KEYS.block(hash_chain(prompt, fingerprint)[0])
    holders = {_HOLDER.pack(epoch, TIER_POOL) for epoch in await epochs(cluster)}

    async def is_found() -> bool:
        names = [KEYS.worker(WorkerId(name)) for name in WORKERS]
        return await redis.exists(*names) == len(names) and holders <= await redis.smembers(row)

    await eventually(is_found)


async def fill_memory(redis: Redis) -> None:
    await redis.config_set("maxmemory-policy", "noeviction")
    await redis.config_set("maxmemory", "1mb")


async def free_memory(redis: Redis) -> None:
    await redis.config_set("maxmemory", "0")


async def fail_to_save(redis: Redis) -> None:
    """As with a full disk: the last snapshot failed, so writes are refused."""
    pid = (await redis.info("server"))["process_id"]
    shutil.rmtree(psutil.Process(pid).cwd())
    await redis.config_set("save", "3600 1")
    await redis.bgsave()

    async def has_failed() -> bool:
        return (await redis.info("persistence"))["rdb_last_bgsave_status"] == "err"

    await eventually(has_failed)


async def save_no_more(redis: Redis) -> None:
    await redis.config_set("stop-writes-on-bgsave-error", "no")


async def become_replica(redis: Redis) -> None:
    await redis.replicaof("127.0.0.1", "1")


async def become_primary(redis: Redis) -> None:
    await redis.replicaof("NO", "ONE")


async def want_a_password(redis: Redis) -> None:
    await redis.config_set("requirepass", "secret")
    await redis.client_kill_filter(_type="normal", skipme=True)


async def want_none(redis: Redis) -> None:
    await redis.config_set("requirepass", "")


REFUSALS = [
    pytest.param(fill_memory, free_memory, "OOM|maxmemory", BEYOND_LEASE_S, id="out of memory"),
    pytest.param(fail_to_save, save_no_more, "MISCONF|disk", 1.5, id="cannot save"),
    pytest.param(become_replica, become_primary, "read only replica", 1.5, id="a read-only replica"),
]


@pytest.mark.parametrize(("break_it", "mend_it", "reason", "for_s"), REFUSALS)
async def test_refused_writes_are_told_once_and_made_up_for(
    cluster, connect, redis, oracle, break_it, mend_it, reason, for_s
):
    before = {name: len(log_of(cluster, name)) for name in WORKERS}
    async with connect(cluster) as client:
        await break_it(redis)
        async with Load(client, new_prompt, 4, 0.2) as load:
            await asyncio.sleep(for_s)
        load.assert_right(oracle)
        if for_s > LEASE_S:
            assert not await redis.exists(*(KEYS.worker(WorkerId(name)) for name in WORKERS))
        await mend_it(redis)
        await wait_found(cluster, redis, load.prompts[-1])
    for name in WORKERS:
        new = log_of(cluster, name)[before[name] :]
        assert 1 <= new.count("Redis refused a call") <= 2, new
        assert any(word in new for word in reason.split("|")), new
        assert "Traceback" not in new
    await assert_well(cluster, oracle)


async def test_a_pause_longer_than_the_lease_is_told_once_and_made_up_for(cluster, connect, redis, oracle):
    def count() -> int:
        return log_of(cluster, "gateway").count("Redis does not answer")

    before = count()
    async with connect(cluster) as client, Load(client, new_prompt, 4, 0.1) as load:
        await asyncio.sleep(0.5)
        os.kill(cluster.valkey.pid, signal.SIGSTOP)
        await asyncio.sleep(BEYOND_LEASE_S)
        os.kill(cluster.valkey.pid, signal.SIGCONT)
        await asyncio.sleep(1.0)
    load.assert_right(oracle)
    assert 1 <= count() - before <= 2, log_of(cluster, "gateway")
    await wait_found(cluster, redis, load.prompts[-1])
    await assert_well(cluster, oracle)


async def test_a_password_that_is_suddenly_wanted_is_told_once_and_costs_nothing_else(
    cluster, connect, redis, oracle
):
    before = {name: len(log_of(cluster, name)) for name in cluster.processes}
    async with connect(cluster) as client:
        await want_a_password(redis)
        async with Load(client, new_prompt, 4, 0.2) as load:
            await asyncio.sleep(BEYOND_LEASE_S)
        load.assert_right(oracle)
        await want_none(redis)
        await wait_found(cluster, redis, load.prompts[-1])
    for name in cluster.processes:
        new = log_of(cluster, name)[before[name] :]
        assert new.count("Redis does not answer (AuthenticationError") == 1, new
        assert "Traceback" not in new
    await assert_well(cluster, oracle)


async def test_block_rows_that_vanish_between_requests_cost_no_right_token(cluster, connect, redis, oracle):
    prompts = [[rng.randrange(256) for _ in range(100)] for _ in range(4)]
    expected = [oracle(prompt, max_tokens=8) for prompt in prompts]
    async with connect(cluster) as client:
        for _ in range(6):
            answers = await asyncio.gather(*(client.generate(p, 8, ignore_eos=True) for p in prompts))
            assert [answer.token_ids for answer in answers] == expected
            rows = [key async for key in redis.scan_iter(KEYS.block(b"*"))]
            gone = rng.sample(rows, len(rows) // 2)
            if gone:
                await redis.delete(*gone)
    await assert_well(cluster, oracle)


async def test_a_dead_epochs_block_rows_lead_nobody_there(cluster, connect, oracle):
    """Redis comes back with rows of a worker that is no more, and with holders that nobody could have written."""
    fingerprint = (await cluster.workers())[0]["record"]["kv_spec"]["fingerprint"]
    prompt = [rng.randrange(256) for _ in range(100)]
    await cluster.stop_valkey()
    await cluster.start_valkey()
    async with Redis.from_url(cluster.redis_url) as redis, connect(cluster) as client:
        chain = hash_chain(prompt, fingerprint)
        for block_hash in chain:
            row = KEYS.block(block_hash)
            await redis.sadd(row, _HOLDER.pack(DEAD_EPOCH, TIER_POOL), b"", b"junk", b"x" * 1000)
        await redis.sadd(KEYS.blocks_of(WorkerId("decode-9"), DEAD_EPOCH), *chain)
        await redis.sadd(KEYS.workers, "decode-9")
        for _ in range(2):
            answer = await client.generate(prompt, 8, ignore_eos=True)
            assert answer.token_ids == oracle(prompt, max_tokens=8)
            assert answer.last.timing.num_attempts == 1
            assert answer.last.timing.prefill_worker_id in WORKERS
            await wait_found(cluster, redis, prompt)
        assert answer.usage.num_cached_tokens == 96
        await eventually(lambda: is_gone(redis, KEYS.workers, b"decode-9"))
        assert {w["record"]["worker_id"] for w in await cluster.workers()} == set(WORKERS)
        assert await redis.ttl(KEYS.block(chain[0])) > 0, "they would stay for ever"
    await assert_well(cluster, oracle)


async def test_a_redis_that_comes_last_and_first_wants_another_password_brings_them_together(cluster, oracle):
    """The last test here: it starts every process anew, before there is a Redis."""
    for managed in cluster.processes.values():
        await managed.kill()
        managed.log.unlink()
    await cluster.stop_valkey()
    cluster.redis_url = cluster.redis_url.replace("redis://", "redis://:given@")
    await cluster.start_gateway(is_waiting=False)
    for name, role in WORKERS.items():
        await cluster.add_worker(role, name)

    async def is_missed() -> bool:
        return all("Redis does not answer" in log_of(cluster, name) for name in cluster.processes)

    await eventually(is_missed)
    await cluster.start_valkey()
    async with Redis.from_url(cluster.valkey.url) as redis:
        await redis.config_set("requirepass", "another")
        await asyncio.sleep(2)
        assert all(managed.process.returncode is None for managed in cluster.processes.values())
        await redis.config_set("requirepass", "given")
        await cluster.wait_gateway()
    for name, managed in cluster.processes.items():
        log = log_of(cluster, name)
        assert log.count("Redis does not answer") == 1, log
        assert "Redis answers again" in log
        assert "given" not in log, "a password has no place in a log"
        assert managed.process.returncode is None
    await assert_well(cluster, oracle)
