"""`tandem verify`: the same prompts in one process, through the tandem over each connector, and in transformers.

A token that differs between one process and the tandem is a fault; so is one that differs from transformers' greedy
choice in float32 where its two best logits are further apart than the rounding.
"""

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

import click
import grpc
import httpx

from core.errors import Unavailable
from core.kv_spec import DType
from core.model_path import public_name, resolve_model
from engine.config import EngineConfig
from gateway.text.tokenizer import TextTokenizer
from proto import client_pb2 as pb
from proto import client_pb2_grpc
from tandem.api_key import authorization
from tandem.served import served
from tandem.verify_prompts import Case, few, make_cases
from tokenizer.files import load_tokenizer_files

NUM_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one way of running compares with one process. `differing` names cases with the first differing position."""

    name: str
    num_cases: int
    num_tokens: int
    differing: tuple[str, ...]


async def run(
    model: str,
    url: str | None,
    connectors: Sequence[str],
    is_short: bool,
    as_json: bool,
    with_transformers: bool,
    own_dtype: DType = DType.FLOAT32,
) -> int:
    """The exit status: 0 when every token agrees. `own_dtype` is of the systems that it starts itself."""
    tokenizer = TextTokenizer(load_tokenizer_files(resolve_model(model)))
    cases = few(make_cases(tokenizer)) if is_short else make_cases(tokenizer)
    dtype = await _dtype_of(url) if url else own_dtype
    say = (lambda text: None) if as_json else click.echo
    say(f"{len(cases)} prompts of {public_name(model)} in {dtype.value}; one process first")
    expected = await asyncio.to_thread(_in_one_process, model, dtype, cases)
    verdicts = []
    if with_transformers and dtype is DType.FLOAT32:
        from tandem.verify_reference import compare_with_transformers

        verdicts.append(
            _show(say, await asyncio.to_thread(compare_with_transformers, model, cases, expected))
        )
    if url:
        verdicts.append(_show(say, await _through(await _grpc_of(url), url, cases, expected)))
    for connector in () if url else connectors:
        options = [model, "--dtype", dtype.value, "--connector", connector]
        async with served(options) as addresses:
            verdicts.append(_show(say, await _through(addresses["grpc"], connector, cases, expected)))
    if as_json:
        click.echo(json.dumps([asdict(verdict) for verdict in verdicts]))
    return 1 if any(verdict.differing for verdict in verdicts) else 0


def _show(say: Any, verdict: Verdict) -> Verdict:
    outcome = "identical" if not verdict.differing else f"DIFFERS in {len(verdict.differing)}"
    say(f"  {verdict.name:<14}{verdict.num_cases:3} prompts {verdict.num_tokens:6} tokens  {outcome}")
    for line in verdict.differing:
        say(f"      {line}")
    return verdict


def _in_one_process(model: str, dtype: DType, cases: Sequence[Case]) -> list[list[int]]:
    """Each prompt alone: batch of one, no prefix cache."""
    import torch

    from engine.llm import LLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    llm = LLM(EngineConfig(model=model, dtype=dtype, enable_prefix_cache=False))
    try:
        return [llm.generate([case.prompt_ids], case.params)[0].token_ids for case in cases]
    finally:
        llm.close()


async def _through(address: str, name: str, cases: Sequence[Case], expected: Sequence[list[int]]) -> Verdict:
    """Every case twice: one after the other (cold, then warm where a prefix is shared), then several at once."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = client_pb2_grpc.TandemStub(channel)
        one_by_one = [await _generate(stub, case) for case in cases]
        gate = asyncio.Semaphore(NUM_AT_ONCE)

        async def gated(case: Case) -> list[int]:
            async with gate:
                return await _generate(stub, case)

        together = await asyncio.gather(*(gated(case) for case in cases))
    differing = [
        f"{case.name} ({way}): {first_difference(want, got)}"
        for way, results in (("alone", one_by_one), ("together", together))
        for case, want, got in zip(cases, expected, results, strict=True)
        if want != got
    ]
    return Verdict(
        name, len(cases) * 2, sum(map(len, one_by_one)) + sum(map(len, together)), tuple(differing)
    )


def first_difference(want: Sequence[int], got: Sequence[int]) -> str:
    """Where and how two outputs part."""
    at = next(
        (i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), min(len(want), len(got))
    )
    return f"position {at}: {list(want[at : at + 3])} in one process, {list(got[at : at + 3])} here"


async def _generate(stub: Any, case: Case) -> list[int]:
    params = case.params
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=case.prompt_ids),
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.seed,
    )
    try:
        answer = await stub.Generate(request, metadata=tuple(authorization().items()))
    except grpc.aio.AioRpcError as error:
        raise Unavailable(f"{case.name}: {error.code().name}: {error.details()}") from error
    return list(answer.choices[0].token_ids)


async def _cluster(url: str) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url) as client:
        try:
            cluster: dict[str, Any] = (await client.get("/cluster")).raise_for_status().json()
        except httpx.HTTPError as error:
            raise Unavailable(f"{url}: {error or type(error).__name__}") from error
    return cluster


async def _dtype_of(url: str) -> DType:
    workers = (await _cluster(url))["workers"]
    if not workers:
        raise Unavailable(f"{url} has no workers")
    return DType(workers[0]["record"]["kv_spec"]["dtype"])


async def _grpc_of(url: str) -> str:
    """As the gateway bound it; a gateway that listens everywhere is reached where its HTTP is."""
    host, _, port = str((await _cluster(url))["grpc"]).rpartition(":")
    is_anywhere = host in ("0.0.0.0", "[::]")
    return f"{urlsplit(url).hostname if is_anywhere else host}:{port}"
