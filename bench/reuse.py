"""What is computed once and used again, and what that costs those who use nothing again: `tandem bench reuse`.

Requests share a prefix that nobody has computed: the first one is cold, those that follow are warm. The last one
comes while the worker that holds it computes a long prompt, so that it is served elsewhere, and the prefix pulled
there. Then prompts that share nothing, in turns at a cluster with a prefix cache and at one without. Last, a cluster
with a disk below its prefix cache is started again, and asked for what it knew.

Pools are small and filled before anything is measured: a page that is touched for the first time costs more than a
cache does, and a cluster without one touches few. The first round does not count either.
"""

import asyncio
import json
import random
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import httpx
from rich.console import Console

from bench import report, systems
from bench.client import OpenAIClient, Outcome
from bench.serve import Target, progress_bar
from bench.traffic import TOKEN_IDS
from core.block_hash import HASH_BLOCK_TOKENS
from core.errors import EngineFailed

OWN_TOKENS = 16
"""Of each prompt after what it shares."""
OUTPUT_TOKENS = 2
POOL_SIZE = 1.25
"""Of what a round needs at a time."""
HEAD_START_S = 0.05
"""Until the long prompt is on its worker."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`rounds` times `num_requests` with the same `prefix_tokens`; and as many turns of `num_unique` prompts of that
    length that share nothing, one after the other. `long_tokens` keep a worker busy."""

    model: str = "smollm2"
    num_prefill: int = 2
    num_decode: int = 2
    prefix_tokens: int = 1024
    num_requests: int = 16
    long_tokens: int = 3000
    rounds: int = 5
    num_unique: int = 6
    vocab_size: int = TOKEN_IDS.stop
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.num_requests < 3:
            raise ValueError("one request is cold, one at least warm, and one served elsewhere")

    def tokens(self, rng: random.Random, count: int) -> list[int]:
        """Of a prompt."""
        return rng.choices(range(min(TOKEN_IDS.start, self.vocab_size // 2), self.vocab_size), k=count)

    @property
    def arguments(self) -> list[str]:
        told = ["--prefill", str(self.num_prefill), "--decode", str(self.num_decode)]
        return [*told, "--num-blocks", str(self.num_blocks), *self.options]

    @property
    def num_blocks(self) -> int:
        """Of each pool."""
        return round(POOL_SIZE * (self.long_tokens + self.prefix_tokens)) // HASH_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Shared:
    """Medians over `rounds` of times to first token, seconds; in `num_pulled` of them there was a pull."""

    cold_s: float
    warm_s: float
    elsewhere_s: float
    rounds: int
    num_pulled: int


@dataclass(frozen=True, slots=True)
class Unique:
    """A cluster with a cache over one without: medians over the prompts, of times to first token and of durations."""

    first_token: float
    duration: float


@dataclass(frozen=True, slots=True)
class Restarted:
    """Medians of times to first token, seconds: of prefixes before a restart, and of the same after it."""

    cold_s: float
    warm_s: float


async def run(plan: Plan, json_path: Path | None = None) -> tuple[Shared, Unique, Restarted]:
    """All, shown; the file if asked for. Raises EngineFailed when a request is not answered whole."""
    with progress_bar(sys.stderr.isatty()) as bar:
        task = bar.add_task("reuse", total=2 * plan.rounds + 3)
        async with systems.tandem(plan.model, plan.arguments).start() as target:
            rounds = []
            await _fill(target, plan)
            for number in range(plan.rounds + 1):
                rounds.append(await _share(target, plan, number))
                bar.advance(task)
            shared = _medians(rounds[1:])
            without = systems.tandem(plan.model, [*plan.arguments, "--no-prefix-cache"])
            async with without.start() as other:
                ratios: list[tuple[float, float]] = []
                for number in range(plan.rounds + 1):
                    found = await _compare(target, other, plan, number)
                    ratios += found if number else []
                    bar.advance(task)
        unique = Unique(*(median(values) for values in zip(*ratios, strict=True)))
        restarted = await _restart(plan)
        bar.advance(task)
    lines = conclusions(shared, unique, restarted)
    for line in lines:
        Console().print(line, markup=False, soft_wrap=True)
    if json_path is not None:
        told = {"machine": report.machine(), "plan": asdict(plan), "conclusions": lines}
        told |= {"shared": asdict(shared), "unique": asdict(unique), "restarted": asdict(restarted)}
        report.write(json_path, json.dumps(told, indent=1))
    return shared, unique, restarted


def conclusions(shared: Shared, unique: Unique, restarted: Restarted) -> list[str]:
    return [
        f"First token, cold {1e3 * shared.cold_s:.0f} ms, warm {1e3 * shared.warm_s:.0f} ms: "
        f"{shared.warm_s / shared.cold_s:.2f} of it.",
        f"Warm while another prompt is computed where the prefix is: {1e3 * shared.elsewhere_s:.0f} ms, "
        f"{shared.elsewhere_s / shared.cold_s:.2f} of cold; {shared.num_pulled} of {shared.rounds} by a pull.",
        f"Without reuse, with a cache over without one: {unique.first_token:.3f} of the time to first token, "
        f"{unique.duration:.3f} of the duration.",
        f"From disk after a restart: {1e3 * restarted.warm_s:.0f} ms, before it, cold, "
        f"{1e3 * restarted.cold_s:.0f} ms: {restarted.warm_s / restarted.cold_s:.2f} of it.",
    ]


@dataclass(frozen=True, slots=True)
class Round:
    cold_s: float
    warm_s: float
    elsewhere_s: float
    was_pulled: bool


async def _share(target: Target, plan: Plan, number: int) -> Round:
    rng = random.Random(number)
    prefix = plan.tokens(rng, plan.prefix_tokens)
    client = target.client()

    async def ask() -> float:
        outcome = await _whole(client, [*prefix, *plan.tokens(rng, OWN_TOKENS)])
        return outcome.first_token_s

    try:
        await client.find_model()
        await _whole(client, plan.tokens(rng, 64))
        cold_s = await ask()
        warm_s = [await ask() for _ in range(plan.num_requests - 2)]
        before = await _num_pulls(target)
        occupying = asyncio.create_task(_whole(client, plan.tokens(rng, plan.long_tokens)))
        await asyncio.sleep(HEAD_START_S)
        elsewhere_s = await ask()
        await occupying
        return Round(cold_s, median(warm_s), elsewhere_s, await _num_pulls(target) > before)
    finally:
        await client.close()


async def _fill(target: Target, plan: Plan) -> None:
    """Every pool, with prompts that share nothing."""
    rng = random.Random("fill")
    num_prompts = plan.num_prefill * (plan.num_blocks * HASH_BLOCK_TOKENS // plan.prefix_tokens + 1)
    client = target.client()
    try:
        await client.find_model()
        for _ in range(-(-num_prompts // plan.num_prefill)):
            prompts = [plan.tokens(rng, plan.prefix_tokens) for _ in range(plan.num_prefill)]
            await asyncio.gather(*(_whole(client, prompt) for prompt in prompts))
    finally:
        await client.close()


def _medians(rounds: Sequence[Round]) -> Shared:
    return Shared(
        median(found.cold_s for found in rounds),
        median(found.warm_s for found in rounds),
        median(found.elsewhere_s for found in rounds),
        len(rounds),
        sum(found.was_pulled for found in rounds),
    )


async def _num_pulls(target: Target) -> float:
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"{target.url}/metrics")).text
    moved = re.findall(r'^tandem_prefix_pulls_total\{outcome="moved"\} (\S+)$', text, re.MULTILINE)
    return sum(map(float, moved))


async def _compare(target: Target, other: Target, plan: Plan, number: int) -> list[tuple[float, float]]:
    """The same prompts at both, one at a time and in changing order, since the machine's speed drifts: of each the
    first's times over the other's."""
    rng = random.Random(f"unique {number}")
    clients = target.client(), other.client()
    ratios: list[tuple[float, float]] = []
    try:
        for client in clients:
            await client.find_model()
        for index in range(plan.num_unique):
            prompt = plan.tokens(rng, plan.prefix_tokens)
            turns = clients if index % 2 else clients[::-1]
            outcomes = [await _whole(client, prompt) for client in turns]
            first, second = outcomes if index % 2 else outcomes[::-1]
            ratios.append((first.first_token_s / second.first_token_s, first.took_s / second.took_s))
    finally:
        for client in clients:
            await client.close()
    return ratios


async def _restart(plan: Plan) -> Restarted:
    """Each prefix is asked for once in either life, by a prompt of its own."""
    rng = random.Random("restart")
    prefixes = [plan.tokens(rng, plan.prefix_tokens) for _ in range(plan.rounds)]
    times_s: list[list[float]] = []
    with tempfile.TemporaryDirectory(prefix="tandem-reuse-") as directory:
        system = systems.tandem(plan.model, [*plan.options, "--disk-cache", directory])
        for _ in range(2):
            async with system.start() as target:
                client = target.client()
                try:
                    await client.find_model()
                    await _whole(client, plan.tokens(rng, OWN_TOKENS))
                    prompts = [[*prefix, *plan.tokens(rng, OWN_TOKENS)] for prefix in prefixes]
                    times_s.append([(await _whole(client, prompt)).first_token_s for prompt in prompts])
                finally:
                    await client.close()
    return Restarted(median(times_s[0]), median(times_s[1]))


async def _whole(client: OpenAIClient, prompt_ids: Sequence[int]) -> Outcome:
    outcome = await client.complete(prompt_ids, OUTPUT_TOKENS)
    if not outcome.is_whole:
        raise EngineFailed(f"a request was not answered: {outcome.status} {outcome.error}")
    return outcome
