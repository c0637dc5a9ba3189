"""The edges of what fits: context, pools, places; and many small requests, for none of which anything may fail."""

import asyncio
import random
from collections.abc import AsyncIterator

import grpc
import httpx
import pytest
import pytest_asyncio

from core.worker import Role
from proto import client_pb2 as pb
from proto import types_pb2 as types
from tandem.testing import LocalCluster
from tests.end_to_end.clients import Client, assert_well

pytestmark = pytest.mark.asyncio(loop_scope="module")
rng = random.Random(15)
CONTEXT_LEN = 2048
SMALL_POOL = 40 * 16
BEYOND_KEEPALIVE_S = 5.5  # idle HTTP connections are closed after 5 s; nothing else has an idle limit


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(start_cluster) -> AsyncIterator[LocalCluster]:
    arguments = ("--max-batch", "128", "--num-blocks", "1024", "--token-budget", "512")
    async with start_cluster(worker_arguments=arguments) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster, connect) -> AsyncIterator[Client]:
    async with connect(cluster) as made:
        yield made


def new_prompt(length: int) -> list[int]:
    return [rng.randrange(256) for _ in range(length)]


async def refusal(work) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await work
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value
    return caught.value.details()


async def assert_edge(client: Client, oracle, limit: int) -> None:
    """Prompts on both sides of the longest one that leaves room for a token."""
    for length in (limit - 2, limit - 1):
        prompt = new_prompt(length)
        answer = await client.generate(prompt, 100, ignore_eos=True)
        assert answer.token_ids == oracle(prompt, max_tokens=limit - length), length
        assert answer.last.finish_reason == types.FINISH_REASON_LENGTH
    for length in (limit, limit + 1):
        details = await refusal(client.generate(new_prompt(length), 100))
        assert details.startswith("token_ids: ") and f"the limit is {limit}" in details


async def test_two_hundred_and_fifty_six_requests_at_once_thrice_and_not_one_fails(cluster, client, oracle):
    prompts = [new_prompt(rng.randrange(1, 40)) for _ in range(64)]
    expected = [oracle(prompt, max_tokens=6) for prompt in prompts]
    for _ in range(3):
        answers = await asyncio.gather(*(client.generate(p, 6, ignore_eos=True) for p in prompts * 4))
        assert [answer.token_ids for answer in answers] == expected * 4
        assert {answer.last.timing.num_attempts for answer in answers} == {1}
    await assert_well(cluster, oracle)


async def test_connections_that_were_idle_for_long_serve_the_next_request(cluster, client, oracle):
    body = {"model": "test", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=cluster.http, timeout=30) as http:
        first = (await http.post("/v1/completions", json=body)).raise_for_status().json()["choices"]
        assert (await client.generate([1, 2, 3], 4, ignore_eos=True)).last.timing.num_attempts == 1
        await asyncio.sleep(BEYOND_KEEPALIVE_S)
        again = (await http.post("/v1/completions", json=body)).raise_for_status().json()["choices"]
        answer = await client.generate([1, 2, 3], 4, ignore_eos=True)
    assert first == again
    assert answer.token_ids == oracle([1, 2, 3], max_tokens=4)
    assert answer.last.timing.num_attempts == 1


async def test_the_longest_prompt_leaves_room_for_one_token_of_the_context(cluster, client, oracle):
    await assert_edge(client, oracle, CONTEXT_LEN)
    await assert_well(cluster, oracle)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ({}, "input"),
        ({"text": ""}, "text"),
        ({"token_ids": pb.TokenIds()}, "token_ids"),
        ({"chat": pb.Chat()}, "chat"),
        ({"token_ids": pb.TokenIds(ids=[512])}, "token_ids"),
    ],
    ids=["nothing", "empty text", "no ids", "no messages", "an id beyond the vocabulary"],
)
async def test_an_empty_prompt_is_refused_by_its_field(client, prompt, field):
    details = await refusal(client.stub.Generate(pb.GenerateRequest(**prompt, max_tokens=4)))
    assert details.startswith(f"{field}: ")


async def test_a_chat_message_without_content_is_a_prompt_like_any_other(cluster, client, oracle):
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="")])
    request = pb.GenerateRequest(chat=chat, max_tokens=4, temperature=0, ignore_eos=True)
    assert (await client.stub.Generate(request)).usage.num_completion_tokens == 4
    await assert_well(cluster, oracle)


async def test_what_no_pool_can_hold_is_refused_while_short_ones_are_served(cluster, client, oracle):
    """The last test here: the only decode worker left has a pool smaller than the context."""
    await cluster.add_worker(Role.DECODE, "small", ("--num-blocks", str(SMALL_POOL // 16)))
    await cluster.wait_workers(["prefill-0", "decode-0", "small"])
    assert await cluster.processes["decode-0"].stop() == 0
    await cluster.wait_workers(["prefill-0", "small"])
    prompts = [new_prompt(20) for _ in range(10)]
    short = [asyncio.create_task(client.generate(prompt, 100, ignore_eos=True)) for prompt in prompts]
    details = await refusal(client.generate(new_prompt(SMALL_POOL + 60), 4))
    assert details.startswith("token_ids: ") and f"the limit is {SMALL_POOL}" in details
    async with httpx.AsyncClient(base_url=cluster.http) as http:
        answer = await http.post("/v1/completions", json={"model": "test", "prompt": new_prompt(1500)})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert not all(task.done() for task in short), "the refusals took as long as the work"
    for prompt, task in zip(prompts, short, strict=True):
        assert (await task).token_ids == oracle(prompt, max_tokens=100)
    await assert_edge(client, oracle, SMALL_POOL)
    prompt = new_prompt(100)
    answer = await client.generate(prompt, 5000, ignore_eos=True)
    assert answer.token_ids == oracle(prompt, max_tokens=SMALL_POOL - 100), "max_tokens is a ceiling"
    await assert_well(cluster, oracle)
