"""Log lines: text for people, JSON for machines, the request's id in both."""

import asyncio
import json
import logging

import pytest

from core.ids import HandoffId, RequestId
from core.logs import TEXT, JsonFormatter, TextFormatter, about, about_handoff, serve_request


class Lines(logging.Handler):
    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def logger() -> logging.Logger:
    made = logging.Logger("a.module")
    made.propagate = False
    return made


def lines_of(logger: logging.Logger, formatter: logging.Formatter) -> list[str]:
    handler = Lines(formatter)
    logger.addHandler(handler)
    return handler.lines


def test_text_has_the_request_and_what_else_is_told_at_its_end(logger):
    lines = lines_of(logger, TextFormatter(TEXT))
    logger.info("ended after %d", 3, extra=about("abc", outcome="stop"))
    logger.warning("nobody's")
    assert lines[0].endswith(" INFO a.module: ended after 3 request_id=abc outcome=stop")
    assert lines[1].endswith(" WARNING a.module: nobody's")


def test_json_is_one_object_a_line_whatever_is_in_it(logger):
    lines = lines_of(logger, JsonFormatter("decode-0"))
    logger.info("two\nlines", extra=about_handoff(HandoffId(RequestId("abc"), 2)))
    try:
        raise ValueError("wrong")
    except ValueError:
        logger.exception("failed")
    first, second = map(json.loads, lines)
    assert not any("\n" in line for line in lines)
    expected = {"level": "INFO", "service": "decode-0", "logger": "a.module", "message": "two\nlines"}
    assert first.items() >= {**expected, "request_id": "abc", "attempt": 2}.items()
    assert "ValueError: wrong" in second["exception"]
    assert "request_id" not in second
    assert first["time"].endswith("+00:00")


async def test_lines_of_a_tenants_request_name_the_tenant(logger):
    lines = lines_of(logger, TextFormatter(TEXT))

    async def serve(tenant: str) -> None:
        serve_request("one", tenant)
        logger.info("ended", extra=about("one", outcome="stop"))

    await asyncio.create_task(serve("research"))
    await asyncio.create_task(serve(""))
    assert lines[0].endswith("ended request_id=one tenant=research outcome=stop")
    assert lines[1].endswith("ended request_id=one outcome=stop")


async def test_lines_of_the_task_that_serves_a_request_and_of_those_it_starts_have_its_id(logger):
    lines = lines_of(logger, JsonFormatter("gateway"))

    async def say(words: str) -> None:
        logger.info(words)

    async def serve(request_id: str) -> None:
        await say("before")
        serve_request(request_id)
        await asyncio.sleep(0)
        await asyncio.create_task(say("within"))
        logger.info("of another", extra=about("other"))

    await asyncio.gather(asyncio.create_task(serve("one")), asyncio.create_task(serve("two")))
    await say("after")
    told = [(line["message"], line.get("request_id")) for line in map(json.loads, lines)]
    assert sorted(told, key=str) == sorted(
        [
            ("before", None),
            ("before", None),
            ("within", "one"),
            ("within", "two"),
            ("of another", "other"),
            ("of another", "other"),
            ("after", None),
        ],
        key=str,
    )
