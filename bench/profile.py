"""What this machine takes for what an engine does: `tandem bench profile`, which the simulator reads.

Each engine is measured on its share of the cores in three companies: alone, with its neighbour's idle core borrowed,
and while that neighbour computes. Then a real tandem answers a few requests: what it takes longer than its steps is
the way between client, gateway and workers.
"""

import asyncio
import contextlib
import json
import os
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

import msgspec
from rich.console import Console

from bench.client import OpenAIClient, Outcome
from bench.load import open_loop
from bench.report import machine, write
from bench.serve import Target
from bench.simulation.costs import HostCosts, LinkCosts, Profile, StepCosts
from bench.traffic import Planned, Traffic
from core.errors import EngineFailed
from core.model_path import public_name
from engine.config import EngineConfig
from engine.engine_geometry import EngineGeometry
from tandem.served import served

CONTEXT_ROOM = 2304
PROBE_PROMPT, PROBE_OUTPUT, NUM_PROBES = 16, 24, 5
PROBE_BATCH = 8
LONG_PROMPT = 512
MARGIN = 1e-5
NUM_STREAMS, STREAM_OUTPUT = 4, 360
BESIDE = (
    *(Planned(0.0, PROBE_PROMPT, STREAM_OUTPUT) for _ in range(NUM_STREAMS)),
    *(Planned(1.0 + 0.1 * index, LONG_PROMPT, 1) for index in range(4)),
)
"""Streams, and prompts that keep the other tier at work for a while."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The model and how it is served: by two workers, on equal shares of the cores, with `options`."""

    config: EngineConfig
    options: tuple[str, ...] = ()


async def run(asked: Asked, path: Path) -> Profile:
    """Measure and write. Raises ModelLoadError, EngineFailed."""
    made = await profile(asked)
    write(path, msgspec.json.format(msgspec.json.encode(made), indent=1).decode())
    show(made)
    return made


def read(path: Path) -> Profile:
    """Raises ValueError for a file that is none, OSError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Profile)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is no profile: {error}") from error


async def profile(asked: Asked) -> Profile:
    geometry = EngineGeometry(asked.config)
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    engines = {half: await host_costs(asked.config, cores[:half], cores[half:])}
    if len(cores) > half:
        engines[len(cores)] = HostCosts.same(await engine_costs(asked.config, cores))
    slowdown, link = await served_costs(asked, engines[half])
    engines = {num_threads: slowdown.of(costs) for num_threads, costs in engines.items()}
    spec = geometry.kv_spec
    return Profile(
        model=public_name(asked.config.model),
        kv_bytes_per_token=spec.block_bytes // spec.block_size,
        context_len=geometry.context_len,
        engines=engines,
        link=link,
        machine=machine(),
    )


async def host_costs(config: EngineConfig, own: Sequence[int], others: Sequence[int]) -> HostCosts:
    """Of an engine with cores of its own beside neighbours on the others."""
    alone = await engine_costs(config, own)
    if not others:
        return HostCosts.same(alone)
    helped = await engine_costs(config, own, borrow=others)
    async with _busy(config, others):
        contended = await engine_costs(config, own)
    return HostCosts(alone, helped, contended)


async def engine_costs(config: EngineConfig, cores: Sequence[int], borrow: Sequence[int] = ()) -> StepCosts:
    """Raises EngineFailed when it cannot be measured."""
    process = await _child(config, cores, {"borrow": list(borrow)})
    assert process.stdout is not None
    written, _ = await process.communicate()
    if process.returncode:
        raise EngineFailed(f"an engine that was to be measured ended with status {process.returncode}")
    return msgspec.json.decode(written.splitlines()[-1], type=StepCosts)


@contextlib.asynccontextmanager
async def _busy(config: EngineConfig, cores: Sequence[int]) -> AsyncIterator[None]:
    """An engine that computes prompts all the time."""
    process = await _child(config, cores, {"hog": True})
    assert process.stdout is not None
    try:
        if not await process.stdout.readline():
            raise EngineFailed("the engine that was to keep other cores busy did not start")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _child(
    config: EngineConfig, cores: Sequence[int], told: dict[str, object]
) -> asyncio.subprocess.Process:
    own = replace(config, num_threads=len(cores), num_blocks=_num_blocks(config))
    message = json.dumps({"config": asdict(own), **told})
    command = [
        "taskset",
        "-c",
        ",".join(map(str, cores)),
        sys.executable,
        "-m",
        "bench.profile_engine",
        message,
    ]
    threads = {"OMP_NUM_THREADS": str(len(cores)), "MKL_NUM_THREADS": str(len(cores))}
    return await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, **threads}
    )


def _num_blocks(config: EngineConfig) -> int:
    """For four long sequences and 32 short ones."""
    return 4 * -(-CONTEXT_ROOM // config.block_size) + 64


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How much longer steps take in a served system than an engine's by itself: services and clients use the same
    cores, and have the least room while both tiers compute. `few` and `many` as `StepCosts.scaled` has them."""

    by_itself: float
    contended_few: float
    contended_many: float

    def of(self, costs: HostCosts) -> HostCosts:
        alone, helped = (each.scaled(self.by_itself, self.by_itself) for each in (costs.alone, costs.helped))
        return HostCosts(alone, helped, costs.contended.scaled(self.contended_few, self.contended_many))


async def served_costs(asked: Asked, costs: HostCosts) -> tuple[Slowdown, LinkCosts]:
    """From requests to a real tandem: long prompts by themselves, and beside streams; and what is left of short
    requests' times when an engine's steps are taken away."""
    options = [asked.config.model, "--max-queue", "600", "--dtype", asked.config.dtype.value]
    options += ["--weights", asked.config.weights.value, *asked.options]
    async with served(options) as addresses:
        client = Target(addresses["http"]).client()
        try:
            await client.find_model()
            single = [await _probe(client, run, 1) for run in range(NUM_PROBES + 1)][1:]
            several = await _probe(client, NUM_PROBES + 2, PROBE_BATCH)
            long = [await _probe(client, NUM_PROBES + 3 + run, 1, LONG_PROMPT) for run in range(NUM_PROBES)]
            beside = await _asked(client, 3 * NUM_PROBES, BESIDE)
        finally:
            await client.close()
    alone = [outcome for (outcome,) in single]
    short_s, long_s = _median_first_s(alone), _median_first_s([outcome for (outcome,) in long])
    longer_s = _prefill_s(costs.helped, LONG_PROMPT) - _prefill_s(costs.helped, PROBE_PROMPT)
    by_itself = max(1.0, (long_s - short_s) / longer_s)
    link = _fit(costs.helped.scaled(by_itself, by_itself), alone, several)
    few, many = _contended(costs.contended, link, beside)
    return Slowdown(by_itself, few, many), link


def _contended(costs: StepCosts, link: LinkCosts, outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """Of streams and of prompts beside each other: by how much both took longer than these costs say."""
    streams, prompts = outcomes[:NUM_STREAMS], outcomes[NUM_STREAMS:]
    start_s = min(prompt.sent_s for prompt in prompts)
    end_s = max(prompt.sent_s + prompt.first_token_s for prompt in prompts)
    gaps = [gap for stream in streams for gap in stream.gaps_between(start_s, end_s)]
    if not gaps:
        raise EngineFailed("the streams had ended before the prompts came")
    overhead_s = link.step_overhead_s + NUM_STREAMS * link.token_overhead_s
    context = PROBE_PROMPT + STREAM_OUTPUT / 2
    few = (fmean(gaps) - overhead_s) / costs.step_s(NUM_STREAMS, NUM_STREAMS, 0.0, NUM_STREAMS * context)
    way_s = link.front_s + 3 * link.hop_s + link.token_s
    many = (end_s - start_s - way_s) / (len(prompts) * _prefill_s(costs, LONG_PROMPT))
    return max(1.0, few), max(1.0, many)


def _prefill_s(costs: StepCosts, num_tokens: int) -> float:
    """A prompt's one step."""
    return costs.step_s(num_tokens, 1, num_tokens * (num_tokens + 1) / 2, 0.0)


def _median_first_s(outcomes: Sequence[Outcome]) -> float:
    return statistics.median(outcome.first_token_s for outcome in outcomes)


async def _probe(
    client: OpenAIClient, run: int, num_requests: int, num_prompt: int = PROBE_PROMPT
) -> list[Outcome]:
    return await _asked(client, run, [Planned(0.0, num_prompt, PROBE_OUTPUT)] * num_requests)


async def _asked(client: OpenAIClient, run: int, requests: Sequence[Planned]) -> list[Outcome]:
    outcomes = await open_loop(client, Traffic("probe", tuple(requests), run=run), seed=run)
    broken = [outcome for outcome in outcomes if not outcome.is_whole]
    if broken:
        raise EngineFailed(f"a probe was not answered: {broken[0].status} {broken[0].error}")
    return outcomes


def _fit(costs: StepCosts, single: Sequence[Outcome], several: Sequence[Outcome]) -> LinkCosts:
    """What is not an engine's step: of a first token, and of the gaps at two batch sizes."""
    usual = LinkCosts()
    first_s = _median_first_s(single) - _prefill_s(costs, PROBE_PROMPT)
    context = PROBE_PROMPT + PROBE_OUTPUT / 2

    def beyond_s(outcomes: Sequence[Outcome], batch: int) -> float:
        gap_s = statistics.median(gap for outcome in outcomes for gap in outcome.gaps_s)
        return max(MARGIN, gap_s - costs.step_s(batch, batch, 0.0, batch * context))

    one_s, many_s = beyond_s(single, 1), beyond_s(several, PROBE_BATCH)
    token_overhead_s = max(0.0, (many_s - one_s) / (PROBE_BATCH - 1))
    front_s = max(MARGIN, first_s - 3 * usual.hop_s - usual.token_s - one_s)
    return replace(
        usual,
        front_s=front_s,
        step_overhead_s=max(MARGIN, one_s - token_overhead_s),
        token_overhead_s=token_overhead_s,
    )


def show(made: Profile) -> None:
    console = Console(width=110)
    console.print(f"{made.model}: {made.machine}")
    for num_threads, costs in made.engines.items():
        for name in ("alone", "helped", "contended"):
            each: StepCosts = getattr(costs, name)
            steps = "  ".join(
                f"{batch}: {each.step_s(batch, batch, 0, batch * 512) * 1e3:.1f}" for batch in (1, 4, 16)
            )
            prompt = f"prompt of 512 {each.step_s(512, 1, 512 * 256, 0) * 1e3:.0f}"
            console.print(
                f"{num_threads} threads, {name:<9}  decode by batch {steps}   {prompt}   (ms, context 512)"
            )
    link = made.link
    console.print(
        f"first token {link.front_s * 1e3:.1f} ms, between steps {link.step_overhead_s * 1e3:.2f} ms and "
        f"{link.token_overhead_s * 1e3:.2f} ms a token, beyond what steps take"
    )
