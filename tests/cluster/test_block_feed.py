"""A mirror that follows real workers' publishers through a real Redis, also one that loses things."""

import random

from cluster.block_events import BlockEvent, read_event
from cluster.block_feed import BlockFeed
from cluster.block_index import BlockIndex, BlockPublisher
from core.ids import BlockHash, Epoch, WorkerId
from gateway.routing.prefix_mirror import PrefixMirror

CHAIN = [BlockHash(bytes([number]) * 16) for number in range(6)]
NAME, EPOCH = WorkerId("w1"), Epoch(1)


class Followed:
    """A feed, its mirror and a worker's publisher, on one Redis."""

    def __init__(self, redis) -> None:
        store = redis.store()
        self.store = store
        self.mirror = PrefixMirror()
        self.feed = BlockFeed(store, BlockIndex(store), self.mirror)
        self.publisher = BlockPublisher(redis.store(), NAME, EPOCH)
        self.feed.follow(NAME, EPOCH)

    async def tell(self, *, stored=(), removed=()) -> None:
        for block_hash in stored:
            self.publisher.note(True, block_hash)
        for block_hash in removed:
            self.publisher.note(False, block_hash)
        while self.publisher._pending:
            assert await self.publisher._publish_batch()

    async def known(self) -> dict[int, int]:
        await self.feed.catch_up()
        return self.mirror.longest_prefix(CHAIN)


async def test_what_was_there_before_is_read_and_what_comes_is_heard(redis):
    followed = Followed(redis)
    await followed.tell(stored=CHAIN[:3])
    assert not followed.feed.is_whole
    assert await followed.known() == {1: 3}
    assert followed.feed.is_whole
    await followed.tell(stored=CHAIN[3:])
    assert await followed.known() == {1: 6}
    await followed.tell(removed=CHAIN[2:3])
    assert await followed.known() == {1: 2}


async def test_a_mirror_of_many_changes_is_that_of_the_worker(redis):
    followed, rng = Followed(redis), random.Random(1)
    hashes = [BlockHash(rng.randbytes(16)) for _ in range(3000)]
    held: set[BlockHash] = set()
    for _ in range(8):
        stored = {h for h in rng.sample(hashes, 900) if h not in held}
        removed = set(rng.sample(sorted(held), len(held) // 2))
        held = (held | stored) - removed
        await followed.tell(stored=stored, removed=removed)
        await followed.feed.catch_up()
    assert {h for h in hashes if followed.mirror.longest_prefix([h])} == held
    assert followed.mirror.num_blocks == len(held)


async def test_a_number_that_is_missing_is_a_snapshot(redis):
    followed = Followed(redis)
    await followed.tell(stored=CHAIN[:3])
    assert await followed.known() == {1: 3}
    await followed.tell(stored=CHAIN[3:4])
    await followed.store.redis.xtrim(followed.store.keys.events, maxlen=0)
    assert await followed.known() == {1: 3}, "nobody can know yet"
    await followed.tell(stored=CHAIN[5:])
    await followed.feed.catch_up()
    assert not followed.feed.is_whole
    assert await followed.known() == {1: 4}
    assert followed.feed.is_whole


async def test_what_is_said_again_after_a_snapshot_does_no_harm(redis):
    """The snapshot has what the events before it say, and some of what those after it do."""
    followed = Followed(redis)
    await followed.feed.catch_up()
    await followed.tell(stored=CHAIN)
    await followed.tell(removed=CHAIN[4:])
    await followed.tell(stored=CHAIN[4:5])
    followed.feed._due[EPOCH] = "gap"
    assert await followed.known() == {1: 5}


async def test_a_flushed_redis_takes_nothing_from_the_mirror(redis):
    followed = Followed(redis)
    await followed.tell(stored=CHAIN[:4])
    assert await followed.known() == {1: 4}
    await followed.store.redis.flushall()
    assert await followed.known() == {1: 4}
    await followed.publisher.republish()
    await followed.tell(stored=CHAIN[4:])
    assert await followed.known() == {1: 6}


async def test_a_stream_begun_anew_by_a_clock_that_is_behind_is_followed(redis):
    followed = Followed(redis)
    await followed.tell(stored=CHAIN[:2])
    assert await followed.known() == {1: 2}
    client, events = followed.store.redis, followed.store.keys.events
    await client.delete(events)
    sequence = followed.publisher._sequence + 1
    fields = {"event": "blocks", "epoch": EPOCH, "sequence": sequence, "stored": CHAIN[2]}
    await client.xadd(events, fields, id="5-1")
    for _ in range(30):
        await followed.feed.catch_up()
    assert await followed.known() == {1: 3}


async def test_redis_away_leaves_the_mirror_as_it_is(redis):
    followed = Followed(redis)
    await followed.tell(stored=CHAIN[:3])
    assert await followed.known() == {1: 3}
    await redis.server.stop()
    for _ in range(5):
        assert await followed.known() == {1: 3}
    await redis.restart()


async def test_a_worker_that_left_holds_nothing_and_its_events_are_nobodys(redis):
    followed = Followed(redis)
    await followed.tell(stored=CHAIN[:3])
    assert await followed.known() == {1: 3}
    await followed.feed.leave(EPOCH)
    await followed.tell(stored=CHAIN[3:])
    assert await followed.known() == {}
    assert followed.mirror.num_blocks == 0


async def test_everything_cleared_is_heard_of(redis):
    followed = Followed(redis)
    await followed.tell(stored=CHAIN[:3])
    assert await followed.known() == {1: 3}
    followed.publisher._must_clear = True
    followed.publisher._held = {CHAIN[0]}
    await followed.publisher._publish_batch()
    assert await followed.known() == {1: 1}


async def test_what_no_worker_would_write_is_passed_over(redis):
    followed = Followed(redis)
    await followed.tell(stored=CHAIN[:2])
    assert await followed.known() == {1: 2}
    wrong = [
        {"event": "blocks"},
        {"event": "blocks", "epoch": "x", "sequence": 2},
        {"event": "blocks", "epoch": 1, "sequence": "many"},
        {"event": "blocks", "epoch": 1, "sequence": 2, "stored": b"short"},
        {"event": "joined", "worker_id": "w1", "epoch": 1},
    ]
    for fields in wrong:
        await followed.store.redis.xadd(followed.store.keys.events, fields)
    await followed.tell(stored=CHAIN[2:3])
    assert await followed.known() == {1: 3}
    assert followed.feed.is_whole


def test_an_event_reads_as_it_was_written():
    class Pipe:
        def xadd(self, stream, fields, **_):
            encode = lambda value: value if isinstance(value, bytes) else str(value).encode()  # noqa: E731
            self.fields = {encode(key): encode(value) for key, value in fields.items()}

    for event in (
        BlockEvent(EPOCH, 1, CHAIN[:2], CHAIN[3:4]),
        BlockEvent(EPOCH, 7, is_cleared=True),
        BlockEvent(EPOCH, 9, removed=CHAIN),
    ):
        pipe = Pipe()
        event.add_to(pipe, "events", 10)
        told = read_event(pipe.fields)
        assert told is not None
        assert (told.sequence, told.is_cleared) == (event.sequence, event.is_cleared)
        assert (list(told.stored), list(told.removed)) == (list(event.stored), list(event.removed))
