"""Redis as a hint: slow, stopped, gone or full of nonsense, it costs a caller its limit at most."""

import asyncio
import logging

import pytest

from cluster.store import FAILURES_TO_OPEN, Store
from core.clock import VirtualClock


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [f"{record.levelname} {record.message.partition(' (')[0]}" for record in caplog.records]


DOWN, UP = "WARNING Redis does not answer", "INFO Redis answers again"


async def test_an_answer_comes_through(redis):
    assert await redis.store().call(lambda redis: redis.ping()) is True


async def test_a_call_to_a_stopped_redis_ends_with_its_own_limit(redis):
    store = redis.store()
    await store.call(lambda redis: redis.ping())
    redis.pause()
    calls = [asyncio.create_task(store.call(lambda redis: redis.ping(), limit_s)) for limit_s in (0.05, 0.5)]
    first, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    assert first == {calls[0]}
    assert await asyncio.gather(*calls) == [None, None]
    redis.resume()


async def test_after_three_failures_nothing_is_tried_for_a_while_and_then_it_recovers(redis, caplog):
    caplog.set_level(logging.INFO, "cluster.store")
    clock = VirtualClock()
    store = Store(redis.server.url, clock=clock)
    redis.stores.append(store)
    num_tries = 0

    async def ping(redis):
        nonlocal num_tries
        num_tries += 1
        return await redis.ping()

    await store.call(ping)
    redis.pause()
    for _ in range(FAILURES_TO_OPEN + 5):
        assert await store.call(ping, limit_s=0.02) is None
    assert num_tries == 1 + FAILURES_TO_OPEN
    redis.resume()
    assert await store.call(ping) is None, "the breaker is still open"
    clock.advance(1.1)
    assert await store.call(ping) is True
    assert store.is_up
    assert lines(caplog) == [DOWN, UP]
    redis.pause()
    for _ in range(FAILURES_TO_OPEN - 1):
        await store.call(ping, limit_s=0.02)
    redis.resume()
    assert await store.call(ping) is True, "an answer in between starts the count anew"


async def test_a_dead_server_is_told_once_and_its_successor_found(redis, caplog):
    caplog.set_level(logging.INFO, "cluster.store")
    clock = VirtualClock()
    store = Store(redis.server.url, clock=clock)
    redis.stores.append(store)
    await store.call(lambda redis: redis.ping())
    await redis.server.stop()
    for _ in range(10):
        assert await store.call(lambda redis: redis.ping()) is None
        clock.advance(2.0)
    await redis.restart()
    assert await store.call(lambda redis: redis.ping()) is True
    assert lines(caplog) == [DOWN, UP]


async def test_the_answer_of_a_cancelled_command_never_reaches_the_next_caller(redis):
    store = redis.store()
    await store.call(lambda redis: redis.set("mine", "secret"))
    await store.call(lambda redis: redis.set("yours", "public"))
    for _ in range(3):
        redis.pause()
        late = asyncio.create_task(store.call(lambda redis: redis.get("mine")))
        await asyncio.sleep(0.05)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        assert await store.call(lambda redis: redis.get("mine"), limit_s=0.05) is None
        redis.resume()
        answers = await asyncio.gather(*(store.call(lambda redis: redis.get("yours")) for _ in range(5)))
        assert answers == [b"public"] * 5


async def test_a_refused_call_is_no_sign_of_a_dead_server_and_told_once(redis, caplog):
    store = redis.store()
    await store.call(lambda redis: redis.set("text", "x"))
    for _ in range(10):
        assert await store.call(lambda redis: redis.smembers("text")) is None
        assert await store.call(lambda redis: redis.get("text")) == b"x"
    assert store.is_up
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "WRONGTYPE" in caplog.text


@pytest.mark.parametrize("num_turns", range(7))
async def test_a_cancellation_is_never_lost_in_a_call(redis, num_turns):
    store = redis.store()
    await store.call(lambda client: client.ping())

    async def calls() -> str:
        await store.call(lambda client: client.get("key"))
        await asyncio.sleep(3600)
        return "went on"

    task = asyncio.create_task(calls())
    for _ in range(num_turns):
        await asyncio.sleep(0)
    task.cancel()
    _, pending = await asyncio.wait([task], timeout=1)
    assert not pending, "the cancellation was swallowed"
    assert task.cancelled()


async def test_a_full_server_is_told_once_whatever_was_to_be_written(redis, caplog):
    store = redis.store()
    await store.redis.config_set("maxmemory", "1mb")

    async def write(redis, number):
        async with redis.pipeline(transaction=number % 2 == 0) as pipe:
            pipe.sadd(f"key-{number}", f"member-{number}")
            await pipe.execute()

    for number in range(10):
        assert await store.call(lambda redis, number=number: write(redis, number)) is None
    assert store.is_up
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "maxmemory" in caplog.text


async def test_one_slow_answer_is_no_sign_of_a_dead_server(redis, caplog):
    store = redis.store()
    await store.call(lambda redis: redis.ping())
    redis.pause()
    assert await store.call(lambda redis: redis.ping(), limit_s=0.02) is None
    redis.resume()
    assert await store.call(lambda redis: redis.ping()) is True
    assert not caplog.records


async def test_more_calls_at_once_than_a_pool_has_connections_all_get_their_answers(redis, caplog):
    caplog.set_level(logging.INFO, "cluster.store")
    store = redis.store()
    calls = [store.call(lambda redis: redis.ping(), limit_s=20) for _ in range(300)]
    assert await asyncio.gather(*calls) == [True] * 300
    assert lines(caplog) == []
