"""A client of any OpenAI-compatible server that notes when each piece of an answer came."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import httpx

from core.errors import Unavailable

TIMEOUT_S = 600.0
REFUSALS = (429, 503)
WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "it",
    "was",
    "for",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "at",
    "be",
    "this",
    "from",
    "have",
    "or",
    "by",
    "one",
    "had",
    "not",
]


@dataclass(slots=True)
class Outcome:
    """One request. `status` is HTTP's, 0 when the connection failed. `sent_s` is the moment on the run's clock, other
    times are seconds since then; `gaps_s` are those between chunks, each of which may hold several tokens. Only
    what is whole has counts and times that mean anything."""

    status: int = 0
    sent_s: float = 0.0
    took_s: float = 0.0
    first_token_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_tokens: int = 0
    num_cached: int = 0
    is_whole: bool = False
    error: str = ""

    @property
    def mean_gap_s(self) -> float:
        """Between chunks."""
        return sum(self.gaps_s) / len(self.gaps_s) if self.gaps_s else 0.0

    @property
    def per_token_s(self) -> float:
        """From the first token to the last, by the number of tokens between: the mean gap between tokens."""
        return sum(self.gaps_s) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0

    @property
    def worst_gap_s(self) -> float:
        return max(self.gaps_s, default=0.0)

    def gaps_between(self, start_s: float, end_s: float) -> list[float]:
        """Those that end in that part of the run."""
        at_s = self.sent_s + self.first_token_s
        found = []
        for gap_s in self.gaps_s:
            at_s += gap_s
            if start_s <= at_s <= end_s:
                found.append(gap_s)
        return found

    @property
    def is_refused(self) -> bool:
        return self.status in REFUSALS


class Endpoint(StrEnum):
    """COMPLETIONS takes prompts as token ids, so their lengths are exact; CHAT as text of about as many words."""

    COMPLETIONS = "completions"
    CHAT = "chat"


class OpenAIClient:
    """Streams completions from `url`, the server's root without `/v1`."""

    def __init__(
        self,
        url: str,
        model: str = "",
        endpoint: Endpoint = Endpoint.COMPLETIONS,
        api_key: str = "none",
        ignores_eos: bool = True,
    ) -> None:
        """`ignores_eos` asks for exactly as many tokens as planned, by a field that OpenAI itself does not know."""
        self._http = httpx.AsyncClient(
            base_url=url.removesuffix("/").removesuffix("/v1"),
            timeout=TIMEOUT_S,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            headers={"authorization": f"Bearer {api_key}"},
        )
        self.model = model
        self._endpoint = endpoint
        self._ignores_eos = ignores_eos

    async def close(self) -> None:
        await self._http.aclose()

    async def find_model(self) -> str:
        """The first one that the server has, unless one was given. Raises Unavailable."""
        if not self.model:
            try:
                answer = (await self._http.get("/v1/models")).raise_for_status().json()
                self.model = answer["data"][0]["id"]
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                raise Unavailable(f"{self._http.base_url} lists no model: {error!r}") from error
        return self.model

    async def complete(self, prompt_ids: Sequence[int], num_output: int) -> Outcome:
        """Never raises: what went wrong is in the outcome."""
        outcome = Outcome(sent_s=time.monotonic(), num_prompt=len(prompt_ids))
        path, body = self._request(prompt_ids, num_output)
        try:
            async with self._http.stream("POST", path, json=body) as response:
                outcome.status = response.status_code
                await self._read(response, outcome)
        except (httpx.HTTPError, json.JSONDecodeError, LookupError) as error:
            outcome.status, outcome.is_whole = 0, False
            outcome.error = repr(error)
        outcome.took_s = time.monotonic() - outcome.sent_s
        return outcome

    def _request(self, prompt_ids: Sequence[int], num_output: int) -> tuple[str, dict[str, Any]]:
        body = {"model": self.model, "max_tokens": num_output, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self._ignores_eos:
            body["ignore_eos"] = True
        if self._endpoint is Endpoint.COMPLETIONS:
            return "/v1/completions", {**body, "prompt": list(prompt_ids)}
        text = " ".join(random.Random(prompt_ids[0]).choices(WORDS, k=len(prompt_ids)))
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}

    async def _read(self, response: httpx.Response, outcome: Outcome) -> None:
        if response.status_code != 200:
            outcome.error = (await response.aread()).decode(errors="replace")[:200]
            return
        last_s, num_chunks = 0.0, 0
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if usage := chunk.get("usage"):
                outcome.num_prompt, outcome.num_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                outcome.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            choice = chunk["choices"][0] if chunk.get("choices") else None
            if choice is None or _is_opening(choice):
                outcome.error = outcome.error or str(chunk.get("error") or "")
                continue
            now_s = time.monotonic()
            if num_chunks:
                outcome.gaps_s.append(now_s - last_s)
            else:
                outcome.first_token_s = now_s - outcome.sent_s
            num_chunks, last_s = num_chunks + 1, now_s
            outcome.is_whole = outcome.is_whole or bool(choice["finish_reason"])
        outcome.num_tokens = outcome.num_tokens or num_chunks


def _is_opening(choice: dict[str, Any]) -> bool:
    """A chat's first chunk names the role and holds no token."""
    delta = choice.get("delta")
    return delta is not None and not delta.get("content") and not choice["finish_reason"]


async def ready(client: OpenAIClient, prompt_ids: Sequence[int], num_output: int = 2) -> None:
    """One request that counts for nothing. Raises Unavailable when the server does not answer it whole."""
    outcome = await client.complete(prompt_ids, num_output)
    if not outcome.is_whole:
        raise Unavailable(f"a first request was not answered: status {outcome.status} {outcome.error}")


async def sleep_until(moment_s: float) -> None:
    """On `time.monotonic`'s clock."""
    await asyncio.sleep(max(0.0, moment_s - time.monotonic()))
