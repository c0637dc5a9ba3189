"""The terminal's clients of a running system: complete, chat and top."""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import click
import grpc
import httpx
from rich.console import Console
from rich.live import Live
from rich.table import Table

from core.errors import TandemError, Unavailable
from proto import client_pb2 as pb
from proto import client_pb2_grpc

STAGES = ("queue", "prefill", "grant_wait", "transfer", "decode_queue", "first_step", "decode")
REFRESH_S = 1.0


async def complete(address: str, prompt: str, max_tokens: int, temperature: float, seed: int | None) -> None:
    request = pb.GenerateRequest(text=prompt, max_tokens=max_tokens, temperature=temperature)
    if seed is not None:
        request.seed = seed
    last, _ = await _show(address, request)
    click.echo("")
    click.echo(describe_timing(last), err=True)


async def chat(address: str, max_tokens: int, temperature: float) -> None:
    messages: list[pb.ChatMessage] = []
    while text := await asyncio.to_thread(_ask):
        messages.append(pb.ChatMessage(role="user", content=text))
        request = pb.GenerateRequest(
            chat=pb.Chat(messages=messages), max_tokens=max_tokens, temperature=temperature
        )
        _, answer = await _show(address, request)
        messages.append(pb.ChatMessage(role="assistant", content=answer))
        click.echo("")


def _ask() -> str:
    sys.stdout.write("> ")
    sys.stdout.flush()
    return sys.stdin.readline().strip()


async def _show(address: str, request: pb.GenerateRequest) -> tuple[pb.GenerateChunk, str]:
    """Print the stream as it comes; its last chunk and the whole text. Raises TandemError."""
    text, last = "", pb.GenerateChunk()
    async for last in _stream(address, request):
        sys.stdout.write(last.choice.text)
        sys.stdout.flush()
        text += last.choice.text
    return last, text


async def _stream(address: str, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateChunk]:
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            async for chunk in client_pb2_grpc.TandemStub(channel).GenerateStream(request):
                yield chunk
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"{address}: {error.code().name}: {error.details()}") from error


def describe_timing(chunk: pb.GenerateChunk) -> str:
    """One line a stage; they add up to the total."""
    timing, usage = chunk.choice.timing, chunk.usage
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
