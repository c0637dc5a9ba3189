"""The rows that operators look at."""

from cluster.handoff_rows import HandoffRows
from core.ids import HandoffId, RequestId


def id_of(number: int) -> HandoffId:
    return HandoffId(RequestId(f"r{number}"), 1)


def key_of(number: int) -> str:
    return f"tandem:{{tests}}:handoff:r{number}#1"


async def test_a_row_says_where_its_handoff_is_and_goes_with_it(redis, background, eventually):
    client, rows = redis.store().redis, HandoffRows(redis.store())
    background(rows.run())
    rows.update(id_of(1), "prefill", "p0", "d0")
    expected = {b"state": b"prefill", b"prefill": b"p0", b"decode": b"d0"}
    await eventually(lambda: _is(client, 1, expected))
    assert await client.ttl(key_of(1)) > 0
    rows.update(id_of(1), "decode", "p0", "d1")
    await eventually(lambda: _is(client, 1, {**expected, b"state": b"decode", b"decode": b"d1"}))
    rows.remove(id_of(1))
    await eventually(lambda: _is(client, 1, {}))


async def _is(client, number: int, expected: dict[bytes, bytes]) -> bool:
    return await client.hgetall(key_of(number)) == expected


async def test_a_handoff_that_ended_before_it_was_written_leaves_no_row(redis, background, eventually):
    client, rows = redis.store().redis, HandoffRows(redis.store())
    rows.update(id_of(1), "prefill", "p0", "d0")
    rows.remove(id_of(1))
    rows.update(id_of(2), "prefill", "p0", "d0")
    background(rows.run())

    async def second_is_written() -> bool:
        return bool(await client.exists(key_of(2)))

    await eventually(second_is_written)
    assert await client.keys("*handoff*") == [key_of(2).encode()]


async def test_while_redis_is_away_the_latest_state_waits(redis, background, eventually):
    rows = HandoffRows(redis.store())
    background(rows.run())
    client = redis.store().redis
    for number in (1, 2):
        rows.update(id_of(number), "prefill", "p0", "d0")
    await eventually(lambda: _is(client, 2, {b"state": b"prefill", b"prefill": b"p0", b"decode": b"d0"}))
    redis.pause()
    rows.remove(id_of(1))
    rows.update(id_of(2), "transfer", "p0", "d0")
    rows.update(id_of(2), "decode", "p0", "d1")
    rows.update(id_of(3), "prefill", "p0", "d0")
    rows.remove(id_of(3))
    redis.resume()
    await eventually(lambda: _is(client, 2, {b"state": b"decode", b"prefill": b"p0", b"decode": b"d1"}))
    await eventually(lambda: _is(client, 1, {}))
    assert await client.keys("*handoff*") == [key_of(2).encode()]


async def test_live_rows_are_renewed_before_they_expire_and_after_they_were_lost(
    redis, background, eventually
):
    client, rows = redis.store().redis, HandoffRows(redis.store(), refresh_s=0.2)
    background(rows.run())
    rows.update(id_of(1), "decode", "p0", "d0")
    row = {b"state": b"decode", b"prefill": b"p0", b"decode": b"d0"}
    await eventually(lambda: _is(client, 1, row))
    await client.flushall()
    await eventually(lambda: _is(client, 1, row))
    rows.remove(id_of(1))
    await eventually(lambda: _is(client, 1, {}))
