"""What `tandem serve` writes to its log: JSON where it is asked for, from every process; requests by their id."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.end_to_end.served import serve

pytestmark = pytest.mark.asyncio(loop_scope="module")


def ended(lines: list[str]) -> list[dict]:
    """What is told of requests that are over."""
    return [json.loads(line) for line in lines if '"request ended"' in line]


def lines_of(directory: Path) -> list[str]:
    return (directory / "log").read_text().splitlines()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def written(tiny_model, tmp_path_factory) -> AsyncIterator[tuple[str, list[str], str]]:
    """The id of a request that was served, the log's lines, and the id of one that the client named."""
    directory = tmp_path_factory.mktemp("log")
    async with (
        serve(tiny_model, directory, "--log-format", "json", "--no-borrow") as (_, addresses),
        httpx.AsyncClient(base_url=addresses["http"]) as http,
    ):
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 3, "ignore_eos": True}
        answer = await http.post("/v1/completions", json=body)
        named = await http.post("/v1/completions", json=body, headers={"x-request-id": "mine-1"})
        assert named.headers["x-request-id"] == "mine-1"
        request_id = answer.headers["x-request-id"]
        async with asyncio.timeout(30):  # a line follows its answer, and our server is killed, not stopped
            while len(ended(lines_of(directory))) < 2:
                await asyncio.sleep(0.05)
    yield request_id, lines_of(directory), "mine-1"


async def test_every_line_of_every_process_is_json_that_says_whose_it_is(written):
    _, lines, _ = written
    objects = [json.loads(line) for line in lines if line.startswith("{")]
    others = [line for line in lines if line and not line.startswith("{")]
    assert not [line for line in others if "INFO" in line or "|" in line]
    assert {"gateway", "prefill-0", "decode-0"} <= {line["service"] for line in objects}
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in objects)


async def test_a_request_has_a_line_with_its_id_and_what_came_of_it(written):
    request_id, lines, client_request_id = written
    (line,) = [line for line in ended(lines) if line["request_id"] == request_id]
    assert line["outcome"] == "length"
    assert line["num_output_tokens"] == 3
    assert (line["prefill"], line["decode"]) == ("prefill-0", "decode-0")
    assert 0 < line["time_to_first_token_s"] <= line["total_s"]
    assert [line for line in ended(lines) if line.get("client_request_id") == client_request_id]
