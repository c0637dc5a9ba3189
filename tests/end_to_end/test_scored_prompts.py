"""What scoring long prompts costs: memory bounded by a chunk, whatever the prompts and their number."""

import asyncio
from pathlib import Path

import httpx
import psutil
import pytest

from core.model_path import resolve_model
from tandem.testing import LocalCluster

NUM_PROMPTS = 4
NUM_TOKENS = 2000
ALLOWED_BYTES = 150 << 20
"""More than what four prompts' scores and one step need; the logits of one prompt alone are 393 MB."""


def engine_bytes(cluster: LocalCluster, name: str) -> int:
    """Of a worker's processes, without the pool: that is a shared mapping."""
    process = psutil.Process(cluster.processes[name].process.pid)
    memory = [part.memory_info() for part in (process, *process.children(recursive=True))]
    return sum(part.rss - part.shared for part in memory)


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_long_prompts_are_scored_within_the_memory_of_a_chunk(start_cluster):
    """A vocabulary of 49152: the real model."""
    arguments = ("--num-blocks", "1024", "--token-budget", "512")
    model = Path(resolve_model("smollm2"))
    async with (
        start_cluster(model=model, worker_arguments=arguments) as cluster,
        httpx.AsyncClient(base_url=cluster.http, timeout=600) as http,
    ):

        async def score(first: int, num_tokens: int) -> list:
            prompt = [(first + 37 * i) % 40_000 for i in range(num_tokens)]
            body = {"model": "test", "prompt": prompt, "max_tokens": 0, "prompt_logprobs": 20}
            while (answer := await http.post("/v1/completions", json=body)).status_code == 429:
                await asyncio.sleep(1.0)
            answer.raise_for_status()
            return answer.json()["choices"][0]["prompt_logprobs"]

        await score(1, 600)
        before = engine_bytes(cluster, "prefill-0")
        scoring = [asyncio.create_task(score(first, NUM_TOKENS)) for first in range(NUM_PROMPTS)]
        most = 0
        while not all(task.done() for task in scoring):
            most = max(most, engine_bytes(cluster, "prefill-0"))
            await asyncio.sleep(0.2)
        for scores in await asyncio.gather(*scoring):
            assert len(scores) == NUM_TOKENS and all(len(entry) >= 20 for entry in scores[1:])
        print(f"{(most - before) / 2**20:.0f} MiB more while {NUM_PROMPTS} prompts were scored")  # noqa: T201
        assert most - before < ALLOWED_BYTES
