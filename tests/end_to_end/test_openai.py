"""The OpenAI endpoints with OpenAI's own client and with bare HTTP, over a real cluster."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
import pytest_asyncio
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from tandem.testing import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODEL = "test"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(start_cluster) -> AsyncIterator[LocalCluster]:
    async with start_cluster() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.http}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.http, timeout=60) as made:
        yield made


async def test_completion_is_that_of_one_process(client, oracle):
    prompt = [72, 101, 108, 108, 111]
    answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=12, temperature=0)
    expected = oracle(prompt, max_tokens=12, stop_token_ids=(258,))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == len(expected)
    assert answer.choices[0].finish_reason == "length"


async def test_streamed_text_is_that_of_the_whole_answer(client):
    messages = [{"role": "user", "content": "hello there"}]
    whole = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=24, temperature=0)
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_chunks_follow_the_schema_to_the_letter(http):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "stream": True}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        assert "usage" not in chunk
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[:-1] == [None] * (len(chunks) - 1)
    assert reasons[-1] in ("stop", "length")


async def test_whole_answer_follows_the_schema(http):
    answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": "abc", "max_tokens": 3})
    Completion.model_validate(answer.json(), strict=True)


async def test_timing_is_in_the_final_chunk_when_asked_for(http):
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 4, "stream": True}
    answer = await http.post("/v1/completions", json=body, headers={"x-tandem-timing": "1"})
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    assert ["timing" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    timing = chunks[-1]["timing"]
    stages = [
        v for k, v in timing.items() if k.endswith("_s") and k not in ("total_s", "time_to_first_token_s")
    ]
    assert sum(stages) == pytest.approx(timing["total_s"], rel=0.05)


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
async def test_a_scored_prompt_comes_with_its_timing_streamed_or_not(http, max_tokens):
    body = {"model": MODEL, "prompt": "abc", "max_tokens": max_tokens, "echo": True, "logprobs": 2}
    headers = {"x-tandem-timing": "1"}
    whole = (await http.post("/v1/completions", json=body, headers=headers)).json()
    assert whole["timing"]["num_attempts"] == 1
    assert len(whole["choices"][0]["logprobs"]["tokens"]) >= 3
    answer = await http.post("/v1/completions", json={**body, "stream": True}, headers=headers)
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    assert ["timing" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


async def test_stop_strings_end_the_text_and_are_not_in_it(client):
    async def ask(**options) -> openai.types.CompletionChoice:
        body = {"ignore_eos": True}
        prompt = list(b"stop here")
        answer = await client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=40, temperature=0, extra_body=body, **options
        )
        return answer.choices[0]

    text = (await ask()).text
    stop = text[len(text) // 2 :][:3]
    choice = await ask(stop=[stop, "never in it"])
    assert choice.finish_reason == "stop"
    assert choice.text == text[: text.index(stop)]


MISTAKES = [
    ({"model": "other", "prompt": "a"}, 404, "model"),
    ({"prompt": "a"}, 400, "model"),
    ({"model": MODEL}, 400, "prompt"),
    ({"model": MODEL, "prompt": ""}, 400, "prompt"),
    ({"model": MODEL, "prompt": []}, 400, "prompt"),
    ({"model": MODEL, "prompt": [""]}, 400, "prompt"),
    ({"model": MODEL, "prompt": [[]]}, 400, "prompt"),
    ({"model": MODEL, "prompt": [-1]}, 400, "prompt"),
    ({"model": MODEL, "prompt": [[-1]]}, 400, "prompt"),
    ({"model": MODEL, "prompt": [1, 2, 512]}, 400, "prompt"),
    ({"model": MODEL, "prompt": [4294967295]}, 400, "prompt"),
    ({"model": MODEL, "prompt": [1.5]}, 400, "prompt"),
    ({"model": MODEL, "prompt": [True]}, 400, "prompt"),
    ({"model": MODEL, "prompt": ["a", 1]}, 400, "prompt"),
    ({"model": MODEL, "prompt": 7}, 400, "prompt"),
    ({"model": MODEL, "prompt": [1] * 2048}, 400, "prompt"),
    ({"model": MODEL, "prompt": [1] * 5000}, 400, "prompt"),
    ({"model": MODEL, "prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    ({"model": MODEL, "prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    ({"model": MODEL, "prompt": "a", "max_tokens": 2**31}, 400, "max_tokens"),
    ({"model": MODEL, "prompt": "a", "max_tokens": 2**63}, 400, "max_tokens"),
    ({"model": MODEL, "prompt": "a", "max_tokens": "4"}, 400, "max_tokens"),
    ({"model": MODEL, "prompt": "a", "temperature": -0.1}, 400, "temperature"),
    ({"model": MODEL, "prompt": "a", "temperature": "1"}, 400, "temperature"),
    ({"model": MODEL, "prompt": "a", "top_p": 0}, 400, "top_p"),
    ({"model": MODEL, "prompt": "a", "top_p": 1.1}, 400, "top_p"),
    ({"model": MODEL, "prompt": "a", "top_k": -2}, 400, "top_k"),
    ({"model": MODEL, "prompt": "a", "stop": ""}, 400, "stop"),
    ({"model": MODEL, "prompt": "a", "stop": ["a"] * 17}, 400, "stop"),
    ({"model": MODEL, "prompt": "a", "stop_token_ids": [512]}, 400, "stop_token_ids"),
    ({"model": MODEL, "prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"model": MODEL, "prompt": "a", "n": 0}, 400, "n"),
    ({"model": MODEL, "prompt": "a", "n": 10**6}, 400, "n"),
    ({"model": MODEL, "prompt": "a", "logit_bias": {"512": 1}}, 400, "logit_bias"),
    ({"model": MODEL, "prompt": "a", "allowed_token_ids": [512]}, 400, "allowed_token_ids"),
    ({"model": MODEL, "prompt": ["a", ""]}, 400, "prompt"),
    ({"model": MODEL, "prompt": [[1], [512]]}, 400, "prompt"),
    ({"model": MODEL, "prompt": "a", "allowed_token_ids": [65], "bad_words": ["A"]}, 400, "body"),
]


@pytest.mark.parametrize(("body", "status", "field"), MISTAKES, ids=lambda value: str(value)[:60])
async def test_a_mistake_is_refused_naming_the_field(http, body, status, field):
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == field
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b'{"model": "test", "prompt": "a", "temperature": NaN}', "body"),
        (b'{"model": "test", "prompt": "a", "temperature": 1e999}', "temperature"),
        (b"[" * 100_000, "body"),
        (b"", "body"),
        (b"[]", "body"),
        (b'{"model": "test", "prompt": "\xff"}', "body"),
    ],
)
async def test_a_body_that_is_not_json_is_refused(http, raw, field):
    answer = await http.post("/v1/completions", content=raw)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        [{"role": "wizard", "content": "hi"}],
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}],
    ],
)
async def test_wrong_messages_are_refused(http, messages):
    answer = await http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"


async def test_a_body_beyond_the_limit_is_413(http):
    answer = await http.post("/v1/completions", content=b" " * (9 << 20))
    assert answer.status_code == 413


async def test_control_tokens_spelled_by_a_client_stay_text(http):
    async def count(content: str) -> int:
        body = {"messages": [{"role": "user", "content": content}]}
        return (await http.post("/v1/tokenize", json=body)).json()["count"]

    plain = await count("")
    assert await count("<|im_end|>") == plain + len("<|im_end|>")
    ids = (await http.post("/v1/tokenize", json={"prompt": "<|im_end|>"})).json()["tokens"]
    assert ids == list(b"<|im_end|>")


async def test_max_tokens_is_a_ceiling(client):
    answer = await client.completions.create(
        model=MODEL, prompt=[1] * 2040, max_tokens=4000, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 8
    assert answer.choices[0].finish_reason == "length"


async def test_a_client_that_leaves_a_whole_answer_frees_its_blocks(http, cluster):
    body = {"model": MODEL, "prompt": "leaving", "max_tokens": 1500, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        await http.post("/v1/completions", json=body, timeout=0.5)
    await cluster.wait_idle(timeout_s=3)


async def test_two_requests_with_the_same_client_id_do_not_mix(http, oracle):
    async def ask(prompt: list[int]) -> str:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        answer = await http.post("/v1/completions", json=body, headers={"x-request-id": "same"})
        assert answer.headers["x-request-id"] == "same"
        return answer.json()["choices"][0]["text"]

    prompts = [list(b"first one"), list(b"another one")]
    together = await asyncio.gather(*map(ask, prompts))
    assert list(together) == [await ask(prompt) for prompt in prompts]
    assert together[0] != together[1]


async def test_models_health_ready_and_cluster(http, client):
    models = (await client.models.list()).data
    assert [model.id for model in models] == [MODEL]
    assert models[0].max_model_len == 2048
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/ready")).status_code == 200
    cluster = (await http.get("/cluster")).json()
    assert {worker["record"]["role"] for worker in cluster["workers"]} == {"prefill", "decode"}
    assert (await http.get("/nothing")).status_code == 404


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [["x"]] * 1_000_000},
        {"prompt": [None] * 1_000_000},
        {"prompt": [1.5] * 1_000_000},
        {"prompt": "a" * 7_900_000},
        {"prompt": "a b" * 2_600_000},
        {"prompt": "a", "stop": [None] * 1_000_000},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}] * 100_000}]},
        {"messages": [{"role": "user", "content": "x" * 7_900_000}]},
    ],
    ids=lambda body: f"{next(iter(body))}-{str(body)[:30]}",
)
async def test_a_huge_body_is_refused_and_holds_nobody_up(http, body):
    raw = json.dumps({"model": MODEL, **body}).encode()
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    attack = asyncio.create_task(http.post(path, content=raw))
    slowest_s = 0.0
    while not attack.done():
        started_s = asyncio.get_running_loop().time()
        assert (await http.get("/health")).status_code == 200
        slowest_s = max(slowest_s, asyncio.get_running_loop().time() - started_s)
        await asyncio.sleep(0.01)
    assert (await attack).status_code == 400, (await attack).text[:300]
    assert slowest_s < 3.0, "sessions would break"


async def test_a_client_that_leaves_a_prompt_whose_prefix_is_being_looked_up_is_noticed(http, cluster):
    """A cancellation that falls into the Redis call must not be lost."""

    async def leave(index: int) -> None:
        body = {"model": MODEL, "prompt": [index, *range(200)], "max_tokens": 1500, "ignore_eos": True}
        with pytest.raises(httpx.ReadTimeout):
            await http.post(
                "/v1/completions", json=body, timeout=httpx.Timeout(5, read=0.003 + 0.001 * index)
            )

    await asyncio.gather(*(leave(index) for index in range(30)))
    await cluster.wait_idle(timeout_s=5)
