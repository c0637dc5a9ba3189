"""The terminal's clients of a running system: complete, chat and flush."""

import asyncio
import contextlib
import sys

import click
import httpx

from core.errors import Unauthenticated, Unavailable
from tandem.api_key import VARIABLE, authorization
from tandem.client import Answer, AsyncClient, Chunk, Message, Prompt, Sampling
from tandem.client_messages import to_answer

STAGES = ("prepare", "queue", "prefill", "grant_wait", "transfer", "decode_queue", "first_step", "decode")


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


async def flush(url: str) -> None:
    """Raises Unavailable unless every worker was told."""
    try:
        async with httpx.AsyncClient() as http:
            answer = await http.post(f"{url.rstrip('/')}/flush_cache", headers=authorization())
        if answer.status_code == 401:
            raise Unauthenticated(f"{url}: {answer.json()['error']['message']} (here from {VARIABLE})")
        told, missed = answer.json()["told"], answer.json()["missed"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise Unavailable(f"{url}: {error!r}") from error
    if missed or not told:
        raise Unavailable(
            f"could not tell {', '.join(missed) or 'anybody'}; told {', '.join(told) or 'nobody'}"
        )
    click.echo(f"told {', '.join(told)}")


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
