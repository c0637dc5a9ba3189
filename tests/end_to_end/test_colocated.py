"""One-process engines with chunked prefill, and short prompts that a tandem's decode workers compute themselves."""

import asyncio
import random

import httpx
import pytest

from gateway.timing import STAGES
from tests.end_to_end.test_serve import complete, serve

ANY_PROMPT = ("--max-local-tokens", "1000000")


def prompt(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=num_tokens)


async def test_colocated_engines_answer_like_one_process_and_their_stages_add_up(
    start_cluster, connect, oracle
):
    async with (
        start_cluster(num_prefill=0, num_decode=2, decode_arguments=ANY_PROMPT) as cluster,
        connect(cluster) as client,
    ):
        await cluster.wait_workers(["decode-0", "decode-1"])
        prompts = [prompt(seed, 40 + 150 * seed) for seed in range(10)]
        answers = await asyncio.gather(*(client.generate(ids, 30, ignore_eos=True) for ids in prompts))
        for ids, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == oracle(ids, max_tokens=30)
            timing = answer.last.timing
            assert (timing.prefill_worker_id, timing.kv_bytes, list(timing.causes)) == ("", 0, [])
            assert sum(getattr(timing, stage) for stage in STAGES) == pytest.approx(timing.total_s)
            assert timing.prefill_s > 0
        assert {answer.last.timing.decode_worker_id for answer in answers} == {"decode-0", "decode-1"}
        await cluster.wait_idle()


async def test_a_short_prompt_needs_no_handoff_where_the_gateway_is_told_so(start_cluster, connect, oracle):
    async with (
        start_cluster(gateway_arguments=("--max-local-tokens", "64")) as cluster,
        connect(cluster) as client,
    ):
        for num_tokens, causes in ((64, ["short_prompt"]), (65, [])):
            ids = prompt(num_tokens, num_tokens)
            answer = await client.generate(ids, 8, ignore_eos=True)
            assert answer.token_ids == oracle(ids, max_tokens=8)
            assert list(answer.last.timing.causes) == causes
        await cluster.wait_idle()


async def test_a_short_prompt_that_its_decode_worker_refuses_is_handed_over(start_cluster, connect, oracle):
    async with (
        start_cluster(
            gateway_arguments=("--max-local-tokens", "64"), decode_arguments=("--max-local-tokens", "32")
        ) as cluster,
        connect(cluster) as client,
    ):
        answer = await client.generate(prompt(1, 50), 8, ignore_eos=True)
        assert answer.token_ids == oracle(prompt(1, 50), max_tokens=8)
        assert list(answer.last.timing.causes) == ["short_prompt", "unavailable"]
        assert answer.last.timing.prefill_worker_id == "prefill-0"
        await cluster.wait_idle()


async def test_serve_colocated(tiny_model, tmp_path):
    async with serve(tiny_model, tmp_path, "--colocated", "1") as (_, addresses):
        assert await complete(addresses["http"])
        async with httpx.AsyncClient(base_url=addresses["http"]) as client:
            workers = (await client.get("/cluster")).json()["workers"]
        assert [worker["record"]["worker_id"] for worker in workers] == ["colocated-0"]
