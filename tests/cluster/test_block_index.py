"""The prefix index against a brute-force answer, and what becomes of it when Redis or a worker goes."""

import asyncio

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.block_index import BlockIndex, BlockPublisher
from core.ids import BlockHash, Epoch, WorkerId

CHAIN = [BlockHash(bytes([number]) * 16) for number in range(6)]
HOLDINGS = st.dictionaries(st.integers(1, 4), st.sets(st.integers(0, 5)), max_size=4)


def publisher_of(redis, epoch: int, **options) -> BlockPublisher:
    return BlockPublisher(redis.store(), WorkerId(f"w{epoch}"), Epoch(epoch), **options)


async def held_by(index: BlockIndex) -> dict[int, int]:
    return await index.longest_prefix(CHAIN)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(holdings=HOLDINGS, length=st.integers(0, 6))
def test_the_longest_prefix_of_each_holder_is_that_of_brute_force(redis_loop, holdings, length):
    redis, run = redis_loop

    async def lookup() -> dict[int, int]:
        store = redis.store()
        await store.redis.flushall()
        for epoch, numbers in holdings.items():
            publisher = publisher_of(redis, epoch)
            for number in numbers:
                publisher.note(True, CHAIN[number])
            await publisher._publish_batch()
        return await BlockIndex(store).longest_prefix(CHAIN[:length])

    expected = {}
    for epoch, numbers in holdings.items():
        depth = next((index for index in range(length) if index not in numbers), length)
        if depth:
            expected[epoch] = depth
    assert run(lookup()) == expected


async def test_stored_and_removed_blocks_follow_the_cache(redis, background, eventually):
    index, publisher = BlockIndex(redis.store()), publisher_of(redis, 1)
    background(publisher.run())
    for block_hash in CHAIN[:4]:
        publisher.note(True, block_hash)
    await eventually(lambda: _is(index, {1: 4}))
    publisher.note(False, CHAIN[2])
    publisher.note(True, CHAIN[5])
    publisher.note(False, CHAIN[5])
    await eventually(lambda: _is(index, {1: 2}))
    assert await redis.store().redis.smembers("tandem:{tests}:blocks:w1:1") == {CHAIN[0], CHAIN[1], CHAIN[3]}


async def _is(index: BlockIndex, expected: dict[int, int]) -> bool:
    return await held_by(index) == expected


async def test_two_publishers_of_one_hash_do_not_disturb_each_other(redis):
    index = BlockIndex(redis.store())
    pair = [publisher_of(redis, 1), publisher_of(redis, 2)]
    for publisher in pair:
        publisher.note(True, CHAIN[0])
        await publisher._publish_batch()
    assert await held_by(index) == {1: 1, 2: 1}
    pair[0].note(False, CHAIN[0])
    await pair[0]._publish_batch()
    assert await held_by(index) == {2: 1}


async def test_an_incarnation_that_is_gone_is_dropped_whole_and_no_other(redis):
    index = BlockIndex(redis.store())
    many = [BlockHash(number.to_bytes(16, "big")) for number in range(1200)]
    for epoch in (1, 2):
        publisher = publisher_of(redis, epoch)
        for block_hash in [*CHAIN, *many]:
            publisher.note(True, block_hash)
        while publisher._pending:
            assert await publisher._publish_batch()
    await index.drop(WorkerId("w1"), Epoch(1))
    assert await held_by(index) == {2: 6}
    await publisher.withdraw()
    assert await redis.store().redis.keys("*") == [b"tandem:{tests}:events"]


async def test_everything_is_published_again_after_a_flush(redis, background, eventually):
    index, publisher = BlockIndex(redis.store()), publisher_of(redis, 1)
    background(publisher.run())
    for block_hash in CHAIN[:3]:
        publisher.note(True, block_hash)
    await eventually(lambda: _is(index, {1: 3}))
    await redis.store().redis.flushall()
    assert await held_by(index) == {}
    await publisher.republish()
    await eventually(lambda: _is(index, {1: 3}))


async def test_what_redis_did_not_take_is_published_when_it_is_back(redis, background, eventually):
    publisher = publisher_of(redis, 1)
    await redis.server.stop()
    background(publisher.run())
    for block_hash in CHAIN[:2]:
        publisher.note(True, block_hash)
    await asyncio.sleep(0.3)
    await redis.restart()
    index = BlockIndex(redis.store())
    await eventually(lambda: _is(index, {1: 2}))


async def test_a_cache_that_always_changes_still_has_its_old_rows_renewed(redis, background, eventually):
    index, publisher = BlockIndex(redis.store()), publisher_of(redis, 1, refresh_s=0.5)
    background(publisher.run())
    publisher.note(True, CHAIN[0])
    await eventually(lambda: _is(index, {1: 1}))
    await redis.store().redis.flushall()

    async def is_back_among_changes() -> bool:
        publisher.note(True, CHAIN[5])
        return await _is(index, {1: 1})

    await eventually(is_back_among_changes)


async def test_rows_expire_by_themselves(redis):
    """The stream of events is bounded by its length."""
    publisher = publisher_of(redis, 1)
    publisher.note(True, CHAIN[0])
    await publisher._publish_batch()
    client = redis.store().redis
    for key in set(await client.keys("*")) - {b"tandem:{tests}:events"}:
        assert await client.ttl(key) > 0, key


async def test_what_waits_for_redis_is_bounded_and_then_told_anew(redis, background, eventually):
    """Many more changes than are held while it is away: what it knew before is void, what is held is told."""
    index, publisher = BlockIndex(redis.store()), publisher_of(redis, 1, max_pending=50)
    publisher.note(True, CHAIN[0])
    assert await publisher._publish_batch()
    await redis.server.stop()
    publisher.note(False, CHAIN[0])
    for number in range(1000):
        gone = BlockHash(number.to_bytes(16, "big"))
        publisher.note(True, gone)
        publisher.note(False, gone)
        assert len(publisher._pending) <= 51
    publisher.note(True, CHAIN[1])
    await redis.restart()
    background(publisher.run())
    held = {CHAIN[1]}

    async def is_told() -> bool:
        _, told = await index.held_by(WorkerId("w1"), Epoch(1)) or (0, ())
        return set(told) == held

    await eventually(is_told)
    assert await held_by(index) == {}


async def test_a_lookup_without_redis_finds_nothing_and_does_not_hold_the_request(redis):
    store = redis.store()
    index = BlockIndex(store)
    await held_by(index)
    redis.pause()
    patient = asyncio.create_task(store.call(lambda redis: redis.ping()))
    assert await held_by(index) == {}
    assert not patient.done(), "the lookup's limit is well below that of other calls"
    redis.resume()
    await patient


async def test_holders_that_no_worker_wrote_are_ignored(redis):
    store = redis.store()
    await store.redis.sadd(store.keys.block(CHAIN[0]), b"nonsense", b"")
    assert await held_by(BlockIndex(store)) == {}


async def test_a_long_chain_is_one_round_trip(redis):
    publisher = publisher_of(redis, 1)
    chain = [BlockHash(number.to_bytes(16, "big")) for number in range(8000)]
    for block_hash in chain:
        publisher.note(True, block_hash)
    while publisher._pending:
        await publisher._publish_batch()
    store = redis.store()
    answer = await store.call(
        lambda client: BlockIndex(store)._script(keys=[store.keys.block(h) for h in chain], client=client)
    )
    assert answer[1] == 8000
