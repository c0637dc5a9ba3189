"""What is asked of a server and when: synthetic traffic, or a trace. Knows nothing of servers.

Two trace formats: Azure's (CSV: arrival, prompt and output tokens; Patel et al., Splitwise, ISCA 2024) and Mooncake's
(JSON lines with `hash_ids` of 512-token blocks, where equal ids are equal text; Qin et al., FAST 2025).
"""

import csv
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

MOONCAKE_BLOCK_TOKENS = 512
TOKEN_IDS = range(1000, 40000)
"""What prompts are drawn from: ids that are text in any usual vocabulary."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One request: `at_s` seconds after the start, a prompt of `num_prompt` tokens, `num_output` to be generated. Its
    first blocks are those of `shared`: equal ids, equal text."""

    at_s: float
    num_prompt: int
    num_output: int
    shared: tuple[int, ...] = ()


class Lengths(NamedTuple):
    """Tokens of prompts and outputs, uniform within a part `spread` around them: 1 is from nothing to twice."""

    num_prompt: int
    num_output: int
    spread: float = 0.0

    def draw(self, rng: random.Random) -> tuple[int, int]:
        return self._around(self.num_prompt, rng), self._around(self.num_output, rng)

    def _around(self, mean: int, rng: random.Random) -> int:
        return max(1, round(mean * rng.uniform(1 - self.spread, 1 + self.spread)))


@dataclass(frozen=True, slots=True)
class Traffic:
    """`requests` in order of arrival; `block_tokens` of each of their shared blocks; `name` says where they are from
    and what was done to them. Prompts are drawn from `token_ids`, others for each `run`: what a run asked is in the
    server's cache in the next one."""

    name: str
    requests: tuple[Planned, ...]
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    token_ids: range = TOKEN_IDS
    run: int = 0

    def of_vocabulary(self, vocab_size: int) -> "Traffic":
        """Prompts of ids below that."""
        return replace(
            self, token_ids=range(min(TOKEN_IDS.start, vocab_size // 2), min(TOKEN_IDS.stop, vocab_size))
        )

    @property
    def rate_per_s(self) -> float:
        """Arrivals a second, on average; infinite when all come at once."""
        span_s = self.requests[-1].at_s
        return len(self.requests) / span_s if span_s else math.inf

    def first(self, num_requests: int) -> "Traffic":
        kept = self.requests[:num_requests]
        return replace(self, requests=kept, name=f"{self.name}, the first {len(kept)}")

    def divided(self, divisor: int) -> "Traffic":
        """Every length by that, rounded, at least 1."""
        if divisor == 1:
            return self
        requests = tuple(
            replace(
                request,
                num_prompt=max(1, round(request.num_prompt / divisor)),
                num_output=max(1, round(request.num_output / divisor)),
            )
            for request in self.requests
        )
        name, block_tokens = f"{self.name}, lengths / {divisor}", max(1, self.block_tokens // divisor)
        return replace(self, name=name, requests=requests, block_tokens=block_tokens)

    def at_rate(self, rate_per_s: float) -> "Traffic":
        """The same gaps, stretched or compressed to that many arrivals a second on average."""
        factor = self.rate_per_s / rate_per_s
        requests = tuple(replace(request, at_s=request.at_s * factor) for request in self.requests)
        return replace(self, requests=requests, name=f"{self.name}, {rate_per_s:g} a second")

    def prompt(self, index: int, seed: int) -> list[int]:
        """The token ids of a request's prompt, the same for the same seed. What no other shares is its own."""
        request = self.requests[index]
        ids: list[int] = []
        for block in request.shared:
            ids += random.Random(f"{seed} {self.run} block {block}").choices(
                self.token_ids, k=self.block_tokens
            )
        own = max(0, request.num_prompt - len(ids))
        ids += random.Random(f"{seed} {self.run} request {index}").choices(self.token_ids, k=own)
        return ids[: request.num_prompt]


def arrivals(rate_per_s: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Moments of a renewal process whose gaps are gamma-distributed with shape `burstiness`: 1 is a Poisson process,
    less comes in bursts, more is steadier. An infinite rate: all at once."""
    at_s = 0.0
    while True:
        yield at_s
        at_s += (
            rng.gammavariate(burstiness, 1.0 / (rate_per_s * burstiness)) if rate_per_s < math.inf else 0.0
        )


def synthetic(
    num_requests: int, rate_per_s: float, burstiness: float, lengths: Lengths, rng: random.Random
) -> Traffic:
    """An open loop; as many arrivals a second as asked for on average, not as drawn. Raises ValueError for what is no
    traffic."""
    if num_requests < 1 or rate_per_s <= 0 or burstiness <= 0 or not 0 <= lengths.spread <= 1:
        raise ValueError("requests, rate and burstiness must be positive, spread between 0 and 1")
    moments = arrivals(rate_per_s, burstiness, rng)
    drawn = Traffic("", tuple(Planned(next(moments), *lengths.draw(rng)) for _ in range(num_requests)))
    requests = drawn.at_rate(rate_per_s).requests if drawn.rate_per_s < math.inf else drawn.requests
    spread = f" ± {lengths.spread:.0%}" if lengths.spread else ""
    name = f"{lengths.num_prompt} + {lengths.num_output} tokens{spread}, {rate_per_s:g} a second"
    name += f", burstiness {burstiness:g}" if burstiness != 1 else ", Poisson"
    return Traffic(name, requests)


def read_trace(path: Path) -> Traffic:
    """A trace in one of the two formats, by its suffix. Raises ValueError naming the line that is wrong."""
    read = {".csv": _azure, ".jsonl": _mooncake}.get(path.suffix)
    if read is None:
        raise ValueError(f"{path}: a trace is .csv (Azure's form) or .jsonl (Mooncake's)")
    lines = path.read_text(encoding="utf-8").splitlines()
    requests = sorted(read(path, lines), key=lambda request: request.at_s)
    if not requests:
        raise ValueError(f"{path}: no request in it")
    start_s = requests[0].at_s
    return Traffic(path.stem, tuple(replace(request, at_s=request.at_s - start_s) for request in requests))


def _azure(path: Path, lines: Sequence[str]) -> Iterator[Planned]:
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            yield Planned(float(row["arrival_s"]), int(row["input_tokens"]), int(row["output_tokens"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: {error!r}") from error


def _mooncake(path: Path, lines: Sequence[str]) -> Iterator[Planned]:
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            shared = tuple(map(int, row["hash_ids"]))
            full = row["input_length"] // MOONCAKE_BLOCK_TOKENS
            yield Planned(
                row["timestamp"] / 1000, int(row["input_length"]), int(row["output_length"]), shared[:full]
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: {error!r}") from error
