"""A cluster with OpenAI's clients, blocking and not, and bare HTTP, for the modules that talk chats to it."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from tandem.testing import LocalCluster

MODEL = "test"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Rome", "Zürich", "<|im_end|>"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
PING = {"type": "function", "function": {"name": "ping"}}


@dataclass(frozen=True)
class OpenAICluster:
    """`client` is for the event loop, `blocking` for threads."""

    cluster: LocalCluster
    client: openai.AsyncOpenAI
    blocking: openai.OpenAI
    http: httpx.AsyncClient

    async def events(self, path: str, body: dict[str, Any]) -> list[str]:
        """The data of a stream's events."""
        answer = await self.http.post(path, json={"model": MODEL, "stream": True, **body})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for event in answer.text.split("\n\n") for line in event.split("\n")]
        return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]

    async def chunks(self, **body: Any) -> list[dict[str, Any]]:
        *chunks, done = await self.events("/v1/chat/completions", body)
        assert done == "[DONE]"
        return [json.loads(chunk) for chunk in chunks]

    async def mistake(self, path: str, **body: Any) -> tuple[int, str]:
        """Status and the field at fault."""
        answer = await self.http.post(path, json={"model": MODEL, **body})
        return answer.status_code, answer.json()["error"]["param"]


@asynccontextmanager
async def openai_cluster(start_cluster: Any) -> AsyncIterator[OpenAICluster]:
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(start_cluster())
        address = {"base_url": f"{cluster.http}/v1", "api_key": "none", "max_retries": 0}
        client = await stack.enter_async_context(openai.AsyncOpenAI(**address))
        blocking = stack.enter_context(openai.OpenAI(**address))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=cluster.http, timeout=60))
        yield OpenAICluster(cluster, client, blocking, http)
