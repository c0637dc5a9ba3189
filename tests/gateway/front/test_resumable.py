"""Streams that are kept: whatever breaks and whoever reads, each chunk is there once, and nothing is kept forever."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from core.errors import Busy, Cancelled, EngineFailed, InvalidRequest, StreamNotFound, WorkerLost
from gateway.front.resumable import ResumableStreams

LIMIT_S = 10.0


class Source:
    """Chunks 0, 1, 2, ... as far as they are let through; the first is the token."""

    def __init__(self, num_chunks: int, error: BaseException | None = None) -> None:
        self.token = ""
        self.is_closed = asyncio.Event()
        self._num_chunks = num_chunks
        self._error = error
        self._released = asyncio.Semaphore(0)

    def release(self, count: int) -> None:
        for _ in range(count):
            self._released.release()

    async def chunks(self, token: str) -> AsyncGenerator[int, None]:
        self.token = token
        try:
            for number in range(self._num_chunks):
                await self._released.acquire()
                yield number
            if self._error is not None:
                raise self._error
        finally:
            self.is_closed.set()


async def take(reader: AsyncGenerator[int, None], count: int) -> list[int]:
    async with asyncio.timeout(LIMIT_S):
        return [await anext(reader) for _ in range(count)]


async def rest(reader: AsyncGenerator[int, None]) -> list[int]:
    async with asyncio.timeout(LIMIT_S):
        return [chunk async for chunk in reader]


async def test_a_reader_gets_every_chunk_as_it_comes():
    streams, source = ResumableStreams[int](), Source(3)
    reader = streams.hold(source.chunks)
    source.release(1)
    assert await take(reader, 1) == [0]
    source.release(2)
    assert await rest(reader) == [1, 2]


async def test_another_owner_learns_no_more_of_a_stream_than_of_one_that_never_was():
    streams, source = ResumableStreams[int](), Source(2)
    reader = streams.hold(source.chunks, "mine")
    source.release(2)
    assert await take(reader, 1) == [0]
    told = []
    for token, owner in ((source.token, "yours"), (source.token, ""), ("none", "mine")):
        with pytest.raises(StreamNotFound) as caught:
            await rest(streams.resume(token, 0, owner))
        told.append(str(caught.value))
    assert len(set(told)) == 1
    assert await rest(streams.resume(source.token, 1, "mine")) == [1], "nobody took it over"


@pytest.mark.parametrize("offset", range(6))
async def test_what_was_received_is_not_repeated_and_the_rest_not_lost(offset):
    streams, source = ResumableStreams[int](), Source(5)
    reader = streams.hold(source.chunks)
    source.release(5)
    assert await take(reader, 3) == [0, 1, 2]
    await reader.aclose()
    assert await rest(streams.resume(source.token, offset)) == list(range(offset, 5))


async def test_a_stream_goes_on_while_nobody_reads():
    streams, source = ResumableStreams[int](), Source(4)
    reader = streams.hold(source.chunks)
    source.release(1)
    await take(reader, 1)
    await reader.aclose()
    source.release(3)
    async with asyncio.timeout(LIMIT_S):
        await source.is_closed.wait()
    assert await rest(streams.resume(source.token, 1)) == [1, 2, 3]


async def test_a_new_reader_supersedes_the_one_before():
    streams, source = ResumableStreams[int](), Source(4)
    first = streams.hold(source.chunks)
    source.release(1)
    await take(first, 1)
    waiting = asyncio.create_task(rest(first))
    await asyncio.sleep(0)
    second = streams.resume(source.token, 0)
    assert await take(second, 1) == [0]
    with pytest.raises(Cancelled):
        await waiting
    source.release(3)
    assert await rest(second) == [1, 2, 3]


async def test_who_was_superseded_does_not_end_the_stream_by_leaving():
    streams, source = ResumableStreams[int](grace_s=0), Source(3)
    first = streams.hold(source.chunks)
    source.release(1)
    await take(first, 1)
    second = streams.resume(source.token, 0)
    await take(second, 1)
    await first.aclose()
    await asyncio.sleep(0.01)
    source.release(2)
    assert await rest(second) == [1, 2]


@pytest.mark.parametrize("num_read", [0, 1])
async def test_a_stream_that_nobody_reads_any_more_is_aborted_and_forgotten(num_read):
    streams, source = ResumableStreams[int](grace_s=0.01), Source(9)
    reader = streams.hold(source.chunks)
    source.release(1)
    if num_read == 0:
        await asyncio.sleep(0)  # it has begun, and its reader never comes
    await take(reader, num_read)
    await reader.aclose()
    async with asyncio.timeout(LIMIT_S):
        await source.is_closed.wait()
    assert len(streams) == 0
    with pytest.raises(StreamNotFound):
        await rest(streams.resume(source.token, 0))


async def test_a_reader_that_comes_in_time_stops_the_expiry():
    streams, source = ResumableStreams[int](grace_s=0.05), Source(2)
    reader = streams.hold(source.chunks)
    source.release(1)
    await take(reader, 1)
    await reader.aclose()
    reader = streams.resume(source.token, 1)
    waiting = asyncio.create_task(rest(reader))
    await asyncio.sleep(0.2)
    source.release(1)
    async with asyncio.timeout(LIMIT_S):
        assert await waiting == [1]


@pytest.mark.parametrize(
    ("error", "told"), [(WorkerLost("gone"), WorkerLost), (ZeroDivisionError(), EngineFailed)]
)
async def test_an_error_is_told_to_whoever_reads_the_end(error, told, caplog):
    streams, source = ResumableStreams[int](), Source(1, error)
    source.release(1)
    reader = streams.hold(source.chunks)
    assert await take(reader, 1) == [0]
    for again in (reader, streams.resume(source.token, 1)):
        with pytest.raises(told):
            await rest(again)
    for pump in list(streams._pumps):
        await asyncio.wait([pump])


async def test_an_offset_beyond_the_stream_is_the_client_s_mistake():
    streams, source = ResumableStreams[int](), Source(2)
    source.release(2)
    await rest(streams.hold(source.chunks))
    assert await rest(streams.resume(source.token, 2)) == []
    with pytest.raises(InvalidRequest) as caught:
        await rest(streams.resume(source.token, 3))
    assert caught.value.field == "offset"


async def test_an_offset_beyond_the_stream_ends_nobody_elses_reading():
    streams, source = ResumableStreams[int](), Source(2)
    source.release(1)
    reader = streams.hold(source.chunks)
    assert await take(reader, 1) == [0]
    with pytest.raises(InvalidRequest):
        await rest(streams.resume(source.token, 2))
    source.release(1)
    assert await rest(reader) == [1]


async def test_the_number_of_streams_is_bounded_and_ended_ones_make_room():
    streams = ResumableStreams[int](max_streams=2)
    sources = [Source(1) for _ in range(3)]
    readers = [streams.hold(source.chunks) for source in sources[:2]]
    waiting = [asyncio.create_task(rest(reader)) for reader in readers]
    await asyncio.sleep(0)
    with pytest.raises(Busy):
        streams.check_room()
    with pytest.raises(Busy):
        streams.hold(sources[2].chunks)
    sources[0].release(1)
    assert await waiting[0] == [0]
    streams.check_room()
    assert len(streams) == 1
    with pytest.raises(StreamNotFound):
        await rest(streams.resume(sources[0].token, 0))
    waiting[1].cancel()


async def test_tokens_cannot_be_guessed():
    streams = ResumableStreams[int]()
    sources = [Source(0) for _ in range(50)]
    for source in sources:
        await rest(streams.hold(source.chunks))
    assert len({source.token for source in sources}) == 50
    assert min(len(source.token) for source in sources) >= 32
