"""Small bodies are parsed in place, large ones in another process, and both end alike."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from core.errors import Busy, EngineFailed, InvalidRequest
from gateway.front.body_parser import MAX_INLINE_BYTES, MAX_WAITING, BodyParser

SMALL, LARGE = b"x" * MAX_INLINE_BYTES, b"x" * (MAX_INLINE_BYTES + 1)


def where(raw: bytes) -> tuple[int, int]:
    return os.getpid(), len(raw)


def refuse(raw: bytes) -> None:
    raise InvalidRequest("prompt", f"{len(raw)} bytes")


def take_long(raw: bytes) -> None:
    signal.pause()


@pytest_asyncio.fixture
async def parser() -> AsyncIterator[BodyParser]:
    made = BodyParser()
    yield made
    await made.close()


async def test_a_large_body_is_parsed_by_another_process_which_stays(parser):
    assert await parser.parse(SMALL, where) == (os.getpid(), len(SMALL))
    first, again = [await parser.parse(LARGE, where) for _ in range(2)]
    assert first == again
    assert first[0] != os.getpid()
    assert first[1] == len(LARGE)


@pytest.mark.parametrize("raw", [SMALL, LARGE])
async def test_a_refusal_names_its_field_wherever_it_was_parsed(parser, raw):
    with pytest.raises(InvalidRequest, match=f"{len(raw)} bytes") as caught:
        await parser.parse(raw, refuse)
    assert caught.value.field == "prompt"


async def test_a_process_that_dies_costs_its_body_an_error_and_the_next_gets_another(parser):
    process, _ = await parser.parse(LARGE, where)
    waiting = asyncio.create_task(parser.parse(LARGE, take_long))
    await asyncio.sleep(0)
    os.kill(process, signal.SIGKILL)
    with pytest.raises(EngineFailed):
        await waiting
    assert (await parser.parse(LARGE, where))[0] not in (process, os.getpid())


async def test_too_many_that_wait_are_busy_and_small_ones_pass(parser):
    waiting = [asyncio.create_task(parser.parse(LARGE, where)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(Busy):
        await parser.parse(LARGE, where)
    assert (await parser.parse(SMALL, where))[0] == os.getpid()
    assert {length for _, length in await asyncio.gather(*waiting)} == {len(LARGE)}
