"""Requests to a server as traffic plans them: in an open loop, whatever becomes of those before, or a closed one."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence

from bench.client import OpenAIClient, Outcome, sleep_until
from bench.traffic import TOKEN_IDS, Traffic

REFUSED_PAUSE_S = 0.2
OnEnd = Callable[[Outcome], None]


def nobody(outcome: Outcome) -> None:
    """Told of each end, does nothing."""


async def open_loop(
    client: OpenAIClient, traffic: Traffic, seed: int, on_end: OnEnd = nobody
) -> list[Outcome]:
    """Each request at its moment, from now on; returns when all have ended, in the traffic's order."""
    prompts = [traffic.prompt(index, seed) for index in range(len(traffic.requests))]
    started_s = time.monotonic()

    async def one(index: int) -> Outcome:
        outcome = await client.complete(prompts[index], traffic.requests[index].num_output)
        outcome.sent_s -= started_s
        on_end(outcome)
        return outcome

    tasks = []
    for index, request in enumerate(traffic.requests):
        await sleep_until(started_s + request.at_s)
        tasks.append(asyncio.create_task(one(index)))
    return list(await asyncio.gather(*tasks))


async def closed_loop(
    client: OpenAIClient, traffic: Traffic, concurrency: int, seed: int, on_end: OnEnd = nobody
) -> list[Outcome]:
    """The traffic's requests in their order, `concurrency` at a time; its moments do not matter. Who is refused waits
    before it goes on: refusals in a row would take the cores from those who are served."""
    started_s = time.monotonic()
    waiting = iter(range(len(traffic.requests)))
    outcomes: dict[int, Outcome] = {}

    async def user() -> None:
        for index in waiting:
            outcome = await client.complete(traffic.prompt(index, seed), traffic.requests[index].num_output)
            outcome.sent_s -= started_s
            outcomes[index] = outcome
            on_end(outcome)
            if outcome.is_refused:
                await asyncio.sleep(REFUSED_PAUSE_S)

    await asyncio.gather(*(user() for _ in range(concurrency)))
    return [outcomes[index] for index in sorted(outcomes)]


def poisson(rate_per_s: float, duration_s: float, rng: random.Random) -> Iterator[float]:
    """Moments of arrival, of a Poisson process given how many come: the rate is the one asked for, not a draw."""
    yield from sorted(rng.uniform(0.0, duration_s) for _ in range(round(rate_per_s * duration_s)))


class Load:
    """Completions of `num_prompt` random tokens and `num_output` tokens each, streamed."""

    def __init__(
        self, url: str, num_prompt: int, num_output: int, rng: random.Random, token_ids: range = TOKEN_IDS
    ) -> None:
        self._client = OpenAIClient(url, model="smollm2")
        self._num_prompt = num_prompt
        self._num_output = num_output
        self._rng = rng
        self._token_ids = token_ids

    async def close(self) -> None:
        await self._client.close()

    async def at(self, moments_s: Sequence[float]) -> list[Outcome]:
        """One request at each moment from now; returns when all have ended."""
        started_s = time.monotonic()
        tasks = []
        for moment_s in moments_s:
            await sleep_until(started_s + moment_s)
            tasks.append(asyncio.create_task(self.one()))
        return await asyncio.gather(*tasks)

    async def closed(self, concurrency: int, duration_s: float) -> list[Outcome]:
        """`concurrency` requests at a time, for so long; those that began in it. Who is refused waits before it asks
        again."""
        until_s = time.monotonic() + duration_s
        outcomes: list[Outcome] = []

        async def user() -> None:
            while time.monotonic() < until_s:
                outcomes.append(await self.one())
                if outcomes[-1].is_refused:
                    await asyncio.sleep(REFUSED_PAUSE_S)

        await asyncio.gather(*(user() for _ in range(concurrency)))
        return outcomes

    async def one(self) -> Outcome:
        return await self._client.complete(
            self._rng.choices(self._token_ids, k=self._num_prompt), self._num_output
        )
