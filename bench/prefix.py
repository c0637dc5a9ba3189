"""What one prefix cache across a cluster is worth: `tandem bench prefix`.

The same trace on the same workers, routed by prefixes and then each worker in turn. Of each: the part of all prompt
tokens that was found in a cache, beside what no cache could exceed (everything kept for ever) and what a cache of the
prefill tier's size could have had with the future known (Belady); and how long first tokens took.
"""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from bench import report, systems
from bench.serve import Asked, Run, measure, progress_bar
from bench.summary import Slo
from bench.traffic import Traffic
from core.block_hash import HASH_BLOCK_TOKENS, hash_chain
from core.errors import EngineFailed
from core.ids import BlockHash

ROUTINGS = ("prefix", "round_robin")
Chains = Sequence[Sequence[BlockHash]]


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one routing. `hit_rate` and `index_error` are in parts of all prompt tokens; seconds."""

    hit_rate: float
    index_error: float
    first_token_p50_s: float
    first_token_p90_s: float
    num_failed: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """Parts of all prompt tokens that a cache could have: of any size, and of `capacity` blocks. `num_blocks` are all
    different ones."""

    num_blocks: int
    infinite: float
    capacity: int | None
    belady: float | None


@dataclass(frozen=True, slots=True)
class Cluster:
    """`memory` is the prefill tier's in parts of all blocks of the trace; None leaves pools as large as they are."""

    model: str = "smollm2"
    num_prefill: int = 2
    num_decode: int = 2
    memory: float | None = None
    options: tuple[str, ...] = ()

    def capacity(self, num_blocks: int) -> int | None:
        return round(self.memory * num_blocks) if self.memory is not None else None

    def arguments(self, routing: str, capacity: int | None) -> list[str]:
        told = ["--prefill", str(self.num_prefill), "--decode", str(self.num_decode), "--routing", routing]
        told += ["--num-blocks", str(-(-capacity // self.num_prefill))] if capacity is not None else []
        return [*told, *self.options]


async def run(cluster: Cluster, asked: Asked, json_path: Path | None = None) -> dict[str, Figures]:
    """Both routings, shown; the file if asked for. Raises ValueError for traffic of several rates."""
    traffic, *others = asked.traffics()
    if others:
        raise ValueError("--rates: one rate, please")
    chains = chains_of(traffic, asked.seed)
    num_tokens = sum(request.num_prompt for request in traffic.requests)
    num_blocks = len({block for chain in chains for block in chain})
    capacity = cluster.capacity(num_blocks)
    belady = belady_hits(chains, capacity) * HASH_BLOCK_TOKENS / num_tokens if capacity is not None else None
    bounds = Bounds(num_blocks, infinite_hits(chains) * HASH_BLOCK_TOKENS / num_tokens, capacity, belady)
    figures = {}
    with progress_bar(sys.stderr.isatty()) as bar:
        for routing in ROUTINGS:
            system = systems.tandem(cluster.model, cluster.arguments(routing, capacity), routing)
            async with system.start() as target:
                done = await measure(target, traffic, Slo(), asked, routing, bar)
                figures[routing] = await _figures(done, target.url, num_tokens)
    _show(traffic, bounds, figures)
    if json_path is not None:
        told = {"machine": report.machine(), "traffic": traffic.name, "bounds": asdict(bounds)}
        rows = {routing: asdict(row) for routing, row in figures.items()}
        report.write(json_path, json.dumps({**told, "routings": rows}, indent=1))
    return figures


def chains_of(traffic: Traffic, seed: int) -> list[list[BlockHash]]:
    """Of each prompt the blocks that may be found: its last token is always computed, and the block it is in."""
    prompts = [traffic.prompt(index, seed) for index in range(len(traffic.requests))]
    return [hash_chain(prompt, "")[: (len(prompt) - 1) // HASH_BLOCK_TOKENS] for prompt in prompts]


def infinite_hits(chains: Chains) -> int:
    """Blocks found by a cache that keeps everything."""
    return belady_hits(chains, sum(map(len, chains)))


def belady_hits(chains: Chains, capacity: int) -> int:
    """Blocks found by a cache of `capacity` blocks that always evicts what is wanted again last, of a prompt its end
    first."""
    depths = {block: depth for chain in chains for depth, block in enumerate(chain)}
    uses: dict[BlockHash, list[int]] = {}
    for index in reversed(range(len(chains))):
        for block in chains[index]:
            uses.setdefault(block, []).append(index)
    held: set[BlockHash] = set()
    num_hits = 0
    for chain in chains:
        num_hits += next((depth for depth, block in enumerate(chain) if block not in held), len(chain))
        for block in chain:
            uses[block].pop()
        held.update(chain)
        if len(held) > capacity:
            order = sorted(
                held, key=lambda block: (uses[block][-1] if uses[block] else inf, depths[block], block)
            )
            held = set(order[:capacity])
    return num_hits


async def _figures(done: Run, url: str, num_tokens: int) -> Figures:
    whole = [outcome for outcome in done.outcomes if outcome.is_whole]
    if not whole:
        raise EngineFailed(f"nothing was answered: {done.outcomes[0].error}")
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"{url}/metrics")).text
    errors = re.findall(r"^tandem_prefix_index_error_tokens_total\{.*\} (\S+)$", text, re.MULTILINE)
    return Figures(
        sum(outcome.num_cached for outcome in whole) / num_tokens,
        sum(map(float, errors)) / num_tokens,
        done.summary.first_token.p50,
        done.summary.first_token.p90,
        len(done.outcomes) - len(whole),
    )


def _show(traffic: Traffic, bounds: Bounds, figures: dict[str, Figures]) -> None:
    console = Console(width=max(100, Console().width))
    table = Table(title=f"{traffic.name}, {traffic.rate_per_s:.3g} a second")
    for name in (
        "routing",
        "tokens found cached",
        "index was wrong by",
        "first token p50, ms",
        "p90, ms",
        "failed",
    ):
        table.add_column(name, justify="left" if name == "routing" else "right")
    for routing, row in figures.items():
        times = (f"{1e3 * row.first_token_p50_s:.0f}", f"{1e3 * row.first_token_p90_s:.0f}")
        table.add_row(routing, f"{row.hit_rate:.1%}", f"{row.index_error:.2%}", *times, str(row.num_failed))
    console.print(table)
    for line in conclusions(bounds, figures):
        console.print(line, markup=False, soft_wrap=True)


def conclusions(bounds: Bounds, figures: dict[str, Figures]) -> list[str]:
    """Against the bounds, and one routing against the other."""
    prefix, turns = (figures[routing] for routing in ROUTINGS)
    lines = [
        f"A cache of all {bounds.num_blocks} blocks would find {bounds.infinite:.1%}: "
        f"{100 * (bounds.infinite - prefix.hit_rate):.1f} points more than by prefix."
    ]
    if bounds.belady:
        lines.append(
            f"One of {bounds.capacity} blocks that knew the future would find {bounds.belady:.1%}: "
            f"by prefix it is {prefix.hit_rate / bounds.belady:.2f} of that."
        )
    if turns.hit_rate and turns.first_token_p50_s:
        lines.append(
            f"By prefix over each in turn: {prefix.hit_rate / turns.hit_rate:.2f} of the hits, "
            f"{prefix.first_token_p50_s / turns.first_token_p50_s:.2f} of the time to first token (p50)."
        )
    return lines
