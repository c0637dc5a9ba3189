"""An open-loop client of an OpenAI endpoint: requests at given moments, whatever becomes of the ones before."""

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import httpx


@dataclass(slots=True)
class Outcome:
    """One request. `status` is HTTP's, 0 when the connection failed; times are seconds since it was sent."""

    status: int = 0
    took_s: float = 0.0
    first_token_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    is_whole: bool = False

    @property
    def mean_gap_s(self) -> float:
        return sum(self.gaps_s) / len(self.gaps_s) if self.gaps_s else 0.0

    @property
    def is_refused(self) -> bool:
        return self.status in (429, 503)


def poisson(rate_per_s: float, duration_s: float, rng: random.Random) -> Iterator[float]:
    """Moments of arrival, of a Poisson process given how many come: the rate is the one asked for, not a draw."""
    yield from sorted(rng.uniform(0.0, duration_s) for _ in range(round(rate_per_s * duration_s)))


TOKEN_IDS = range(1000, 40000)
REFUSED_PAUSE_S = 0.2


class Load:
    """Completions of `num_prompt` random tokens and `num_output` tokens each, streamed."""

    def __init__(
        self, url: str, num_prompt: int, num_output: int, rng: random.Random, token_ids: range = TOKEN_IDS
    ) -> None:
        self._client = httpx.AsyncClient(
            base_url=url, timeout=600, limits=httpx.Limits(max_connections=None, max_keepalive_connections=64)
        )
        self._num_prompt = num_prompt
        self._num_output = num_output
        self._rng = rng
        self._token_ids = token_ids

    async def close(self) -> None:
        await self._client.aclose()

    async def at(self, moments_s: Sequence[float]) -> list[Outcome]:
        """One request at each moment from now; returns when all have ended."""
        started_s = time.monotonic()
        tasks = []
        for moment_s in moments_s:
            await asyncio.sleep(max(0.0, started_s + moment_s - time.monotonic()))
            tasks.append(asyncio.create_task(self.one()))
        return await asyncio.gather(*tasks)

    async def closed(self, concurrency: int, duration_s: float) -> list[Outcome]:
        """`concurrency` requests at a time, for so long; those that began in it. Who is refused waits before it asks
        again: refusals in a row would take the cores from those who are served."""
        until_s = time.monotonic() + duration_s
        outcomes: list[Outcome] = []

        async def client() -> None:
            while time.monotonic() < until_s:
                outcomes.append(await self.one())
                if outcomes[-1].is_refused:
                    await asyncio.sleep(REFUSED_PAUSE_S)

        await asyncio.gather(*(client() for _ in range(concurrency)))
        return outcomes

    async def one(self) -> Outcome:
        prompt = self._rng.choices(self._token_ids, k=self._num_prompt)
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": self._num_output, "temperature": 0}
        outcome = Outcome()
        started_s = time.monotonic()
        try:
            request = {**body, "stream": True, "ignore_eos": True}
            async with self._client.stream("POST", "/v1/completions", json=request) as response:
                outcome.status = response.status_code
                await self._read(response, outcome, started_s)
        except httpx.HTTPError:
            outcome.status = 0
        outcome.took_s = time.monotonic() - started_s
        return outcome

    async def _read(self, response: httpx.Response, outcome: Outcome, started_s: float) -> None:
        if response.status_code != 200:
            await response.aread()
            return
        last_s = 0.0
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            now_s = time.monotonic()
            if last_s:
                outcome.gaps_s.append(now_s - last_s)
            else:
                outcome.first_token_s = now_s - started_s
            last_s = now_s
            outcome.is_whole = bool(chunk.get("choices") and chunk["choices"][0]["finish_reason"])
