"""What langchain-openai does with a tandem: in its environment:
`python -m bench.clients.langchain_cases URL MODEL`."""

import sys
from typing import Any

import openai
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

from bench.clients.cases import run, same

URL, MODEL = sys.argv[1:]
PROMPT = "The capital of France is"
OTHER = "One, two, three,"
SCHEMA = {
    "title": "verdict",
    "description": "Whether it is so, and how sure that is.",
    "type": "object",
    "properties": {
        "answer": {"enum": ["yes", "no"]},
        "percent": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["answer", "percent"],
    "additionalProperties": False,
}
COMMON: dict[str, Any] = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}
GREEDY = {**COMMON, "temperature": 0, "max_tokens": 12}
llm = OpenAI(**GREEDY)
chat = ChatOpenAI(**GREEDY)


def completion() -> str:
    """completion, whole and streamed"""
    return same("".join(llm.stream(PROMPT)), llm.invoke(PROMPT))


async def async_completion() -> str:
    """completion, asynchronous, whole and streamed"""
    streamed = "".join([part async for part in llm.astream(PROMPT)])
    return same(streamed, await llm.ainvoke(PROMPT))


def batch() -> str:
    """completions of several prompts in one request"""
    result = llm.generate([PROMPT, OTHER])
    assert result.llm_output is not None
    usage = result.llm_output["token_usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"], usage
    same([own[0].text for own in result.generations], [llm.invoke(PROMPT), llm.invoke(OTHER)])
    return str(usage)


def chat_whole() -> str:
    """chat, whole and streamed"""
    whole = chat.invoke(PROMPT)
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] <= 12, whole.usage_metadata
    return same("".join(str(part.content) for part in chat.stream(PROMPT)), whole.content)


async def async_chat() -> str:
    """chat, asynchronous, whole and streamed"""
    streamed = "".join(
        [str(part.content) async for part in chat.astream([("system", "Be brief."), ("user", PROMPT)])]
    )
    return same(streamed, (await chat.ainvoke([("system", "Be brief."), ("user", PROMPT)])).content)


def usage_of_a_stream() -> str:
    """chat, streamed with usage"""
    last = [part for part in chat.stream(PROMPT, stream_usage=True) if part.usage_metadata][-1]
    assert last.usage_metadata is not None
    whole = chat.invoke(PROMPT).usage_metadata
    assert whole is not None
    return same(last.usage_metadata["total_tokens"], whole["total_tokens"])


def logprobs() -> str:
    """chat with log-probabilities"""
    answer = ChatOpenAI(**GREEDY, logprobs=True, top_logprobs=3).invoke(PROMPT)
    content = answer.response_metadata["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 3 and entry["logprob"] <= 0 for entry in content)
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in content), (
        "greedy takes the likeliest"
    )
    return f"{len(content)} tokens"


def structured() -> str:
    """with_structured_output, by a JSON schema"""
    answer = (
        ChatOpenAI(**{**GREEDY, "max_tokens": 60})
        .with_structured_output(SCHEMA, method="json_schema")
        .invoke(PROMPT)
    )
    assert isinstance(answer, dict)
    assert answer["answer"] in ("yes", "no") and 0 <= answer["percent"] <= 99, answer
    return str(answer)


async def async_structured() -> str:
    """with_structured_output, strict, asynchronous and with the raw answer"""
    asking = ChatOpenAI(**{**GREEDY, "max_tokens": 60}).with_structured_output(
        SCHEMA, method="json_schema", strict=True, include_raw=True
    )
    answer = await asking.ainvoke(PROMPT)
    assert isinstance(answer, dict)
    assert answer["parsing_error"] is None, answer["parsing_error"]
    assert answer["parsed"]["answer"] in ("yes", "no"), answer
    return str(answer["parsed"])


def refused() -> str:
    """a mistake is the client's own error"""
    try:
        ChatOpenAI(**{**GREEDY, "top_p": 7}).invoke(PROMPT)
    except openai.BadRequestError as error:
        return same(error.param, "top_p")
    raise AssertionError("nothing was raised")


def embeddings() -> str:
    """embeddings, which there are none of"""
    try:
        OpenAIEmbeddings(**COMMON, check_embedding_ctx_length=False).embed_query("a")
    except openai.NotFoundError as error:
        return str(error.message)
    raise AssertionError("nothing was raised")


CASES = (
    completion,
    async_completion,
    batch,
    chat_whole,
    async_chat,
    usage_of_a_stream,
    logprobs,
    structured,
    async_structured,
    refused,
    embeddings,
)

if __name__ == "__main__":
    run(CASES)
