"""Several choices, several prompts, and what is told of each token, over HTTP and with OpenAI's client."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from core.sampling import SamplingParams
from tandem.testing import LocalCluster
from tests.end_to_end.clients import make_request

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODEL = "test"
EOS = 258
PROMPT = list(b"a prompt that fills two blocks of sixteen and some")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(start_cluster) -> AsyncIterator[LocalCluster]:
    async with start_cluster(num_prefill=2, num_decode=2) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.http, timeout=60) as made:
        yield made


async def complete(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT, **fields})
    assert answer.status_code == 200, answer.text
    checked = answer.json()
    for choice in checked["choices"]:
        if fields.get("echo") and choice["logprobs"]:  # a first token has none; the type does not know
            choice["logprobs"] = {name: values[1:] for name, values in choice["logprobs"].items()}
    Completion.model_validate(checked, strict=True)
    return answer.json()


async def events_of(http: httpx.AsyncClient, path: str, **fields: Any) -> list[dict[str, Any]]:
    answer = await http.post(path, json={"model": MODEL, "stream": True, **fields})
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def tokens_of(one_process: Any, choice: int, **params: Any) -> list[int]:
    own = SamplingParams(**{"max_tokens": 12, "stop_token_ids": (EOS,), **params})
    seeded = SamplingParams(
        **{**{n: getattr(own, n) for n in own.__slots__}, "seed": own.choice_seed(choice)}
    )
    return one_process(PROMPT, seeded).token_ids


async def test_each_choice_is_what_its_seed_makes_in_one_process(cluster, connect, one_process):
    async with connect(cluster) as client:
        request = make_request(PROMPT, 12, temperature=1.0, seed=5, n=4, presence_penalty=1.0)
        answer = await client.stub.Generate(request)
    expected = [tokens_of(one_process, i, seed=5, presence_penalty=1.0, temperature=1.0) for i in range(4)]
    assert [list(choice.token_ids) for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({tuple(tokens) for tokens in expected}) == 4
    assert answer.usage.num_prompt_tokens == len(PROMPT)
    assert answer.usage.num_completion_tokens == sum(map(len, expected))


async def test_the_prompt_crosses_once_for_all_its_choices(cluster, connect):
    prompt = list(range(160))
    async with connect(cluster) as client:
        request = make_request(prompt, 6, temperature=1.0, n=4, ignore_eos=True)
        answer = await client.stub.Generate(request)
    leader, *followers = [choice.timing for choice in answer.choices]
    assert leader.kv_bytes > 0
    assert all(timing.kv_bytes <= leader.kv_bytes // 10 for timing in followers), followers
    assert {timing.decode_worker_id for timing in followers} == {leader.decode_worker_id}


async def test_streamed_choices_are_those_of_the_whole_answer(http):
    fields = {"prompt": PROMPT, "max_tokens": 10, "seed": 3, "n": 3, "logprobs": 2}
    whole = await complete(http, **fields)
    chunks = await events_of(http, "/v1/completions", **fields, stream_options={"include_usage": True})
    *parts, last = chunks
    for part in parts:  # OpenAI's own streams have null where nothing has ended, whatever its type says
        ended = {**part["choices"][0], "finish_reason": part["choices"][0]["finish_reason"] or "stop"}
        Completion.model_validate({**part, "choices": [ended]}, strict=True)
    assert last["usage"] == whole["usage"] and last["choices"] == []
    for choice in whole["choices"]:
        own = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert [part["finish_reason"] for part in own][:-1] == [None] * (len(own) - 1)
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        for name, values in choice["logprobs"].items():
            assert [value for part in own for value in part["logprobs"][name]] == values, name


async def test_every_chat_chunk_of_several_choices_follows_the_schema(http):
    messages = [{"role": "user", "content": "hi"}]
    fields = {"messages": messages, "max_tokens": 5, "n": 2, "logprobs": True, "top_logprobs": 2}
    chunks = await events_of(
        http, "/v1/chat/completions", **fields, stream_options={"continuous_usage_stats": True}
    )
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    openings = [chunk["choices"][0] for chunk in chunks[:2]]
    assert [(choice["index"], choice["delta"]["role"]) for choice in openings] == [
        (0, "assistant"),
        (1, "assistant"),
    ]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] > counts[0]
    whole = await http.post("/v1/chat/completions", json={"model": MODEL, **fields})
    answer = ChatCompletion.model_validate(whole.json(), strict=True)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content
        for token in choice.logprobs.content:
            assert len(token.top_logprobs) == 2
            assert token.bytes is not None


async def test_prompts_of_one_request_are_answered_in_order(http, oracle):
    prompts = [list(b"one"), list(b"another"), list(b"a third")]
    answer = await complete(http, prompt=prompts, max_tokens=4, temperature=0, n=2, logprobs=0)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts[::2] == texts[1::2]
    alone = [await complete(http, prompt=prompt, max_tokens=4, temperature=0) for prompt in prompts]
    assert texts[::2] == [own["choices"][0]["text"] for own in alone]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


async def test_the_best_of_several_have_the_likeliest_tokens(http):
    fields = {"max_tokens": 6, "seed": 9, "logprobs": 0}
    every = await complete(http, n=6, **fields)
    best = await complete(http, n=2, best_of=6, **fields)

    def mean(choice: dict[str, Any]) -> float:
        values = choice["logprobs"]["token_logprobs"]
        return sum(values) / len(values)

    ranked = sorted(every["choices"], key=mean, reverse=True)
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in ranked[:2]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert best["usage"] == every["usage"]


async def test_a_prompt_is_scored_and_echoed_without_output(http, one_process):
    expected = one_process(PROMPT, SamplingParams(1, num_prompt_logprobs=2))
    answer = await complete(http, max_tokens=0, echo=True, logprobs=2)
    (choice,) = answer["choices"]
    assert choice["text"] == bytes(PROMPT).decode()
    assert answer["usage"]["completion_tokens"] == 0
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [chr(token) for token in PROMPT]
    assert logprobs["text_offset"] == list(range(len(PROMPT)))
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    scores = [score.logprob for score in expected.prompt_scores]
    assert logprobs["token_logprobs"][1:] == pytest.approx(scores, abs=1e-4)
    for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert token in top and len(top) in (2, 3)


async def test_an_echoed_prompt_comes_before_each_choice(http):
    answer = await complete(http, prompt="hello", max_tokens=3, temperature=0, echo=True, n=2, logprobs=0)
    plain = await complete(http, prompt="hello", max_tokens=3, temperature=0)
    for choice in answer["choices"]:
        assert choice["text"] == "hello" + plain["choices"][0]["text"]
    chunks = await events_of(http, "/v1/completions", prompt="hello", max_tokens=3, temperature=0, echo=True)
    assert "".join(c["choices"][0]["text"] for c in chunks) == answer["choices"][0]["text"]


async def test_scores_of_a_prompt_that_is_cached_are_those_of_a_cold_one(http):
    fields = {"prompt": list(range(100)), "max_tokens": 1, "prompt_logprobs": 1, "temperature": 0}
    first, second = [await complete(http, **fields) for _ in range(2)]
    assert first["choices"] == second["choices"]
    scores = first["choices"][0]["prompt_logprobs"]
    assert len(scores) == 100 and scores[0] is None
    assert all(str(token) in scores[token] for token in range(1, 100))


async def test_many_scores_are_the_same_through_every_door(cluster, http, connect):
    fields = {"prompt": list(range(200)), "max_tokens": 1, "prompt_logprobs": 20, "temperature": 0, "n": 2}
    whole = (await complete(http, **fields))["choices"]
    answer = await http.post(
        "/v1/completions", json={"model": MODEL, "stream": True, **fields}, headers={"x-tandem-timing": "1"}
    )
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    assert all(event["timing"]["total_s"] > 0 for event in events)
    for event in events:
        (choice,) = event["choices"]
        assert choice["prompt_logprobs"] == whole[choice["index"]]["prompt_logprobs"]
    async with connect(cluster) as client:
        request = make_request(fields["prompt"], 1, prompt_logprobs=20, n=2)
        answer = await client.stub.Generate(request)
        streamed = [chunk.choice async for chunk in client.stub.GenerateStream(request)]
    for choice in (*answer.choices, *streamed):
        assert choice.timing.total_s > 0
        told = [score.logprob for score in choice.prompt_logprobs[1:]]
        assert told == pytest.approx(
            [entry[str(token)]["logprob"] for token, entry in enumerate(whole[0]["prompt_logprobs"]) if entry]
        )


async def test_a_bad_word_is_never_said(http):
    plain = (await complete(http, max_tokens=30, temperature=0, ignore_eos=True))["choices"][0]["text"]
    word = next(character for character in plain if character.isascii() and character.isupper())
    told = (await complete(http, max_tokens=30, temperature=0, ignore_eos=True, bad_words=[word]))["choices"][
        0
    ]
    assert word in plain and word not in told["text"]


async def test_a_stop_reason_names_what_ended_it(http):
    fields = {"max_tokens": 9, "logit_bias": {"65": 100}}
    by_string = (await complete(http, **fields, stop=["AAA"]))["choices"][0]
    assert (by_string["text"], by_string["finish_reason"], by_string["stop_reason"]) == ("", "stop", "AAA")
    by_token = (await complete(http, **fields, stop_token_ids=[65]))["choices"][0]
    assert (by_token["finish_reason"], by_token["stop_reason"]) == ("stop", 65)
    by_end = (await complete(http, max_tokens=9, logit_bias={str(EOS): 100}))["choices"][0]
    assert (by_end["finish_reason"], by_end["stop_reason"]) == ("stop", None)


async def test_tokens_are_text_again(http):
    ids = (await http.post("/v1/tokenize", json={"prompt": "hé llo"})).json()["tokens"]
    answer = await http.post("/v1/detokenize", json={"model": MODEL, "tokens": ids})
    assert answer.json() == {"prompt": "hé llo"}
    refused = await http.post("/v1/detokenize", json={"tokens": [512]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")


async def test_there_are_no_embeddings(http):
    client = openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="no embeddings"):
        await client.embeddings.create(model=MODEL, input="x")
    await client.close()


async def test_a_client_that_leaves_ends_every_choice(cluster, http):
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1500, "n": 6, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        await http.post("/v1/completions", json=body, timeout=0.5)
    await cluster.wait_idle()


async def test_choices_of_a_killed_decode_worker_continue_on_another(cluster, connect, one_process):
    """Last: the cluster has one decode worker afterwards."""
    wishes = {"temperature": 1.0, "seed": 7, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
    async with connect(cluster) as client:
        requests = [
            make_request(PROMPT, 400, n=3, min_tokens=400, logprobs=2, **wishes),
            make_request(PROMPT[3:], 400, n=3, min_tokens=400, **wishes),
        ]
        calls = [asyncio.ensure_future(client.stub.Generate(request)) for request in requests]
        await asyncio.sleep(0.6)
        await cluster.processes["decode-0"].kill()
        first, second = await asyncio.gather(*calls)
    causes = [
        cause for answer in (first, second) for choice in answer.choices for cause in choice.timing.causes
    ]
    assert "worker_lost" in causes
    for index, choice in enumerate(first.choices):
        expected = tokens_of(one_process, index, **wishes, max_tokens=400, min_tokens=400)
        assert list(choice.token_ids) == expected
        assert len(choice.logprobs) == 400
    await cluster.wait_idle()
