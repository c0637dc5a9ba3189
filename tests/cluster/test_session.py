"""Outboxes, silence and the worker's end of a session, with limits made small."""

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from cluster.background import keep_running
from cluster.session import Outbox, SessionHost, heard_within
from core.clock import VirtualClock
from core.errors import WorkerLost


async def taken(outbox: Outbox[int], count: int, keepalive_s: float = 60.0) -> list[list[int]]:
    batches = outbox.batches(keepalive_s)
    return [await anext(batches) for _ in range(count)]


async def test_what_gathers_travels_as_one_batch_in_order():
    outbox: Outbox[int] = Outbox()
    for item in range(3):
        outbox.put(item)
    batches = outbox.batches(60.0)
    assert await anext(batches) == [0, 1, 2]
    waiting = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    outbox.put(3)
    outbox.put(4)
    assert await waiting == [3, 4]


async def test_when_there_is_nothing_a_keepalive_is_sent():
    assert await taken(Outbox(), 3, keepalive_s=0.01) == [[], [], []]


async def test_closing_ends_the_batches_and_drops_what_is_left():
    outbox: Outbox[int] = Outbox()
    batches = outbox.batches(60.0)
    waiting = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    outbox.put(1)
    outbox.close()
    outbox.put(2)
    with pytest.raises(StopAsyncIteration):
        await waiting
    assert [batch async for batch in outbox.batches()] == []


async def test_a_queue_of_too_many_bytes_breaks_the_session():
    outbox: Outbox[int] = Outbox(max_bytes=100)
    outbox.put(1, 60)
    outbox.put(2, 40)
    assert not outbox.is_closed
    assert await taken(outbox, 1) == [[1, 2]]
    outbox.put(3, 60)
    outbox.put(4, 41)
    assert outbox.is_closed
    assert [batch async for batch in outbox.batches()] == []


async def test_a_queue_that_nobody_takes_for_too_long_breaks_the_session():
    clock = VirtualClock()
    outbox: Outbox[int] = Outbox(max_age_s=10.0, clock=clock)
    outbox.put(1)
    clock.advance(9.0)
    outbox.put(2)
    assert await taken(outbox, 1) == [[1, 2]]
    outbox.put(3)
    clock.advance(10.0)
    outbox.put(4)
    assert not outbox.is_closed, "what was taken does not count"
    clock.advance(0.1)
    outbox.put(5)
    assert outbox.is_closed


async def messages(*items: object) -> AsyncIterator[object]:
    """Numbers are pauses in seconds, other things messages."""
    for item in items:
        if isinstance(item, float):
            await asyncio.sleep(item)
        else:
            yield item


async def test_messages_pass_until_they_end():
    assert [item async for item in heard_within(messages("a", 0.001, "b"), 60.0)] == ["a", "b"]


async def test_silence_is_a_lost_worker():
    heard = heard_within(messages("a", 60.0, "b"), 0.05)
    assert await anext(heard) == "a"
    with pytest.raises(WorkerLost):
        await anext(heard)


async def test_a_peer_that_keeps_talking_is_never_lost():
    items = [part for number in range(12) for part in (0.02, number)]
    assert len([item async for item in heard_within(messages(*items), 0.2)]) == 12


class Host(SessionHost[str, str]):
    """Echoes; `boom` is a command that it has a bug for."""

    def __init__(self, silence_s: float = 60.0) -> None:
        super().__init__(silence_s)
        self.ended: list[Outbox[str]] = []
        self.opened: list[Outbox[str]] = []

    def on_command(self, command: str, events: Outbox[str]) -> None:
        if events not in self.opened:
            self.opened.append(events)
        if command == "boom":
            raise KeyError(command)
        events.put(command.upper())

    def on_session_end(self, events: Outbox[str]) -> None:
        assert events.is_closed
        self.ended.append(events)

    async def all_ended(self) -> bool:
        return not self._tasks


async def events_of(session: AsyncIterator[list[str]]) -> list[str]:
    return [event async for batch in session for event in batch]


async def test_a_session_greets_answers_and_ends_with_its_peer(eventually):
    host = Host()
    commands = messages("a", None, "b", 0.05)
    assert await events_of(host.serve("hello", commands)) == ["hello", "A", "B"]
    assert host.ended == host.opened
    await eventually(host.all_ended)


async def test_a_peer_that_falls_silent_ends_its_own_session_only(caplog):
    host = Host(silence_s=0.2)
    talker = messages(*[part for number in range(12) for part in (str(number), 0.03)])
    silent, talking = await asyncio.gather(
        events_of(host.serve("hello", messages("a", 60.0))), events_of(host.serve("hello", talker))
    )
    assert silent == ["hello", "A"]
    assert talking == ["hello", *map(str, range(12))]
    assert len(host.ended) == 2
    assert [record.message for record in caplog.records] == ["session broken: nothing was heard for 0.2 s"]


async def test_a_consumer_that_stops_early_ends_the_session(eventually):
    host = Host()
    session = host.serve("hello", messages("a", 60.0))
    assert await anext(session) == ["hello"]
    await session.aclose()
    assert len(host.ended) == 1
    await eventually(host.all_ended)


async def test_a_bug_in_a_command_ends_the_session_and_is_logged(caplog, eventually):
    host = Host()
    assert await events_of(host.serve("hello", messages("a", 0.01, "boom", "b"))) == ["hello", "A"]
    assert len(host.ended) == 1
    await eventually(host.all_ended)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info[0] is KeyError


async def test_a_loop_that_fails_is_logged_and_begun_again(caplog):
    runs = 0
    done = asyncio.Event()

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            raise ValueError("garbage")
        done.set()
        await asyncio.sleep(60)

    task = asyncio.create_task(keep_running("discovery", work, restart_s=0.001))
    await done.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert runs == 3
    assert ["discovery failed" in record.message for record in caplog.records] == [True, True]


async def test_draining_is_told_at_once_in_every_open_session():
    host = Host()
    batches = [host.serve("hello", messages(60.0)) for _ in range(2)]
    assert [await anext(batch) for batch in batches] == [["hello"], ["hello"]]
    host.drain()
    assert [await anext(batch) for batch in batches] == [[], []]
    assert host.is_draining
    for batch in batches:
        await batch.aclose()
