"""The terminal's clients of a running system: complete, chat and top."""

import asyncio
import contextlib
import sys
from typing import Any

import click
import httpx
from rich.console import Console
from rich.live import Live
from rich.table import Table

from core.errors import TandemError
from tandem.client import Answer, AsyncClient, Chunk, Message, Prompt, Sampling
from tandem.client_messages import to_answer

STAGES = ("prepare", "queue", "prefill", "grant_wait", "transfer", "decode_queue", "first_step", "decode")
REFRESH_S = 1.0


async def complete(address: str, prompt: str, max_tokens: int, temperature: float, seed: int | None) -> None:
    answer = await _show(address, prompt, Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed))
    click.echo("")
    click.echo(describe_timing(answer), err=True)


async def chat(address: str, max_tokens: int, temperature: float) -> None:
    messages: list[Message] = []
    while text := await asyncio.to_thread(_ask):
        messages.append(Message("user", text))
        answer = await _show(address, messages, Sampling(max_tokens=max_tokens, temperature=temperature))
        messages.append(Message("assistant", answer.text))
        click.echo("")


def _ask() -> str:
    sys.stdout.write("> ")
    sys.stdout.flush()
    return sys.stdin.readline().strip()


async def _show(address: str, prompt: Prompt, sampling: Sampling) -> Answer:
    """Print the stream as it comes. Raises TandemError."""
    chunks: list[Chunk] = []
    async with AsyncClient(address) as client, contextlib.aclosing(client.stream(prompt, sampling)) as stream:
        async for chunk in stream:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
            chunks.append(chunk)
    return to_answer(chunks)


def describe_timing(answer: Answer) -> str:
    """One line a stage; they add up to the total."""
    timing, usage = answer.timing, answer.usage
    lines = [f"  {stage:<13}{getattr(timing, f'{stage}_s') * 1000:9.1f} ms" for stage in STAGES]
    lines.append(f"  {'total':<13}{timing.total_s * 1000:9.1f} ms")
    path = f"{timing.prefill_worker_id} -> {timing.decode_worker_id or 'nobody'}"
    carried = f"{timing.kv_bytes / 1024:.0f} KiB over {timing.connector}" if timing.connector else "no KV"
    lines.append(f"  {path}, {carried}, {timing.num_attempts} attempt(s)")
    cached = f"{usage.num_cached_tokens} of {usage.num_prompt_tokens} prompt tokens cached"
    lines.append(f"  {cached}, {usage.num_completion_tokens} generated")
    return "\n".join(lines)


async def top(url: str, once: bool) -> None:
    """A table of the workers, live unless `once`. Raises TandemError when the gateway does not answer."""
    async with httpx.AsyncClient(base_url=url, timeout=5.0) as client:
        if once:
            Console().print(_table(await _cluster(client)))
            return
        with Live(_table(await _cluster(client))) as live:
            while True:
                await asyncio.sleep(REFRESH_S)
                live.update(_table(await _cluster(client)))


async def _cluster(client: httpx.AsyncClient) -> dict[str, Any]:
    try:
        answer = await client.get("/cluster")
        answer.raise_for_status()
    except httpx.HTTPError as error:
        raise TandemError(f"{client.base_url}: {error or type(error).__name__}") from error
    cluster: dict[str, Any] = answer.json()
    return cluster


def _table(cluster: dict[str, Any]) -> Table:
    requests = cluster["requests"]
    stages = [request["state"] for request in requests]
    by_stage = ", ".join(f"{stages.count(stage)} {stage}" for stage in sorted(set(stages)))
    table = Table(
        title=f"{cluster['model']}: {len(requests)} requests" + (f" ({by_stage})" if by_stage else "")
    )
    for column in ("worker", "role", "up", "running", "waiting", "queued tokens", "step ms", "blocks"):
        table.add_column(column)
    for worker in cluster["workers"]:
        record, load = worker["record"], worker["load"]
        blocks = "  ".join(f"{state} {count}" for state, count in load["blocks_by_state"].items() if count)
        table.add_row(
            record["worker_id"],
            record["role"],
            "yes" if worker["is_up"] else "no",
            str(load["num_running"]),
            str(load["num_waiting"]),
            str(load["num_queued_tokens"]),
            f"{load['step_s'] * 1000:.1f}",
            blocks,
        )
    return table
