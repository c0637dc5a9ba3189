"""Outputs that take a form, through the tandem: they do, and are those of one process whatever befell a worker."""

import asyncio
import json
import string
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
import pytest_asyncio

from core.sampling import SamplingParams
from core.worker import Role
from gateway.text.grammar import OutputForm, choice, grammar, json_object, json_schema, regex, to_grammar
from proto import client_pb2 as pb
from proto import types_pb2 as types
from tandem.testing import LocalCluster
from tests.end_to_end.clients import Client
from tokenizer.files import load_tokenizer_files

EOS = 258
PROMPT = list(b"describe somebody as JSON: ")
WORD = {"type": "string", "pattern": "^[a-z ]{1,12}$"}
PERSON = {
    "type": "object",
    "properties": {"name": WORD, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 12, "maxItems": 12}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(start_cluster) -> AsyncIterator[LocalCluster]:
    async with start_cluster(num_decode=2, worker_arguments=("--num-blocks", "700")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(cluster, connect) -> AsyncIterator[Client]:
    async with connect(cluster) as connected:
        yield connected


@pytest.fixture(scope="module")
def read(tiny_model) -> Callable[[list[int]], str]:
    tokenizer = load_tokenizer_files(tiny_model).tokenizer
    return lambda token_ids: tokenizer.decode(token_ids)


def expected(one_process: Any, form: OutputForm, prompt: list[int], **params: Any) -> list[int]:
    sampling = SamplingParams(**params, stop_token_ids=(EOS,), grammar=to_grammar(form))
    return one_process(prompt, sampling).token_ids


def is_person(text: str) -> bool:
    person = json.loads(text)
    is_named = set(person["name"]) <= set(string.ascii_lowercase + " ")
    return set(person) == {"name", "age"} and is_named and 0 <= person["age"] <= 99


@pytest.mark.asyncio(loop_scope="module")
async def test_every_form_is_that_of_one_process_greedy_drawn_and_penalised(client, one_process, read):
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.2, "seed": 5, "top_p": 0.9},
        {"temperature": 0.8, "seed": 6, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 5},
    ]
    rules = 'root ::= word ("-" word)+\nword ::= [a-z]+'
    forms = [
        (json_schema("f", PERSON), pb.StructuredOutputs(json=json.dumps(PERSON)), is_person),
        (json_object("f"), pb.StructuredOutputs(json_object=True), lambda text: text.startswith("{")),
        (regex("f", "[0-9]{3}-x"), pb.StructuredOutputs(regex="[0-9]{3}-x"), lambda text: text[3:] == "-x"),
        (choice("f", ["yes", "no"]), pb.StructuredOutputs(choice=["yes", "no"]), {"yes", "no"}.__contains__),
        (grammar("f", rules), pb.StructuredOutputs(grammar=rules), lambda text: "-" in text[1:]),
    ]
    asked = [(form, own) for form in forms for own in options]
    answers = await asyncio.gather(
        *(client.generate(PROMPT, 80, structured_outputs=form[1], **own) for form, own in asked)
    )
    for ((form, _, holds), own), answer in zip(asked, answers, strict=True):
        assert answer.token_ids == expected(one_process, form, PROMPT, max_tokens=80, **own), (form, own)
        if answer.last.finish_reason == types.FINISH_REASON_STOP:
            assert holds(read(answer.token_ids)), (form, own)
            assert answer.token_ids[-1] == EOS


@pytest.mark.asyncio(loop_scope="module")
async def test_over_http_each_choice_takes_the_form_and_a_form_that_is_none_is_refused_first(cluster):
    async with httpx.AsyncClient(base_url=cluster.http, timeout=60) as http:
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
        asked = {"model": "test", "messages": [{"role": "user", "content": "who?"}], "response_format": form}
        sampling = {"n": 3, "seed": 1, "logprobs": True, "top_logprobs": 2, "ignore_eos": True}
        answer = (await http.post("/v1/chat/completions", json={**asked, **sampling})).json()
        texts = [one["message"]["content"] for one in answer["choices"]]
        assert len(texts) == 3 and all(map(is_person, texts)), texts
        assert all(one["finish_reason"] == "stop" for one in answer["choices"])
        assert all(len(one["logprobs"]["content"][0]["top_logprobs"]) == 2 for one in answer["choices"])
        refused = {
            "guided_regex": "[",
            "guided_json": {"type": "foo"},
            "guided_grammar": "<<<>>>",
            "structured_outputs": {"regex": "a", "choice": ["b"]},
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"$ref": "http://127.0.0.1/"}},
            },
        }
        for name, value in refused.items():
            body = {"model": "test", "prompt": "x", name: value}
            response = await http.post("/v1/completions", json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, name), response.text
        assert (await http.get("/cluster")).json()["requests"] == []


@pytest.mark.asyncio(loop_scope="module")
async def test_a_form_is_kept_when_the_decode_worker_is_killed_in_mid_answer(
    cluster, client, one_process, read
):
    await cluster.wait_workers(["prefill-0", "decode-0", "decode-1"])
    form = pb.StructuredOutputs(json=json.dumps(PEOPLE))
    prompts = [PROMPT[start:] for start in range(6)]
    streams = [
        asyncio.create_task(client.generate(prompt, 1500, structured_outputs=form)) for prompt in prompts
    ]
    await asyncio.sleep(0.7)
    await cluster.processes["decode-0"].kill()
    answers = await asyncio.gather(*streams)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = expected(one_process, json_schema("f", PEOPLE), prompt, max_tokens=1500, temperature=0.0)
        assert answer.token_ids == tokens
        assert all(is_person(json.dumps(person)) for person in json.loads(read(answer.token_ids)))
    assert max(answer.last.timing.num_attempts for answer in answers) == 2
    await cluster.wait_idle()
    await cluster.add_worker(Role.DECODE, "decode-0")
