"""What litellm does with a tandem: `python -m bench.clients.litellm_cases URL MODEL`, in its environment."""

import json
import sys
from typing import Any

import litellm

from bench.clients.cases import run, same

URL, MODEL = sys.argv[1:]
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}
COMMON: dict[str, Any] = {
    "model": f"openai/{MODEL}",
    "api_base": f"{URL}/v1",
    "api_key": "none",
    "num_retries": 0,
}
GREEDY = {**COMMON, "messages": MESSAGES, "temperature": 0, "max_tokens": 12}


def delta(part: Any) -> str:
    return part.choices[0].delta.content or ""


def completion() -> str:
    """completion(), whole and streamed"""
    whole = litellm.completion(**GREEDY)
    assert whole.usage.completion_tokens <= 12, whole.usage
    return same(
        "".join(map(delta, litellm.completion(**GREEDY, stream=True))), whole.choices[0].message.content
    )


async def acompletion() -> str:
    """acompletion(), whole and streamed"""
    whole = await litellm.acompletion(**GREEDY)
    streamed = "".join([delta(part) async for part in await litellm.acompletion(**GREEDY, stream=True)])
    return same(streamed, whole.choices[0].message.content)


def usage_of_a_stream() -> str:
    """completion(), streamed with usage"""
    parts = list(litellm.completion(**GREEDY, stream=True, stream_options={"include_usage": True}))
    usage = next(part.usage for part in parts if getattr(part, "usage", None))
    return same(usage.total_tokens, litellm.completion(**GREEDY).usage.total_tokens)


def several() -> str:
    """completion() with n, stop and seed"""
    asked = {**GREEDY, "temperature": 1, "seed": 7, "n": 3, "stop": ["zzz"]}
    first, again = (
        [choice.message.content for choice in litellm.completion(**asked).choices] for _ in range(2)
    )
    assert len(first) == 3, first
    return same(first, again)


def logprobs() -> str:
    """completion() with log-probabilities"""
    content = litellm.completion(**GREEDY, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    return f"{len(content)} tokens"


def text_completion() -> str:
    """text_completion(), whole and streamed"""
    asked = {**COMMON, "model": f"text-completion-openai/{MODEL}", "prompt": "One, two,", "temperature": 0}
    whole = litellm.text_completion(**asked, max_tokens=8).choices[0].text
    streamed = litellm.text_completion(**asked, max_tokens=8, stream=True)
    return same("".join(part.choices[0].text or "" for part in streamed), whole)


def structured() -> str:
    """completion() by a JSON schema"""
    form = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA, "strict": True}}
    asked = {**GREEDY, "max_tokens": 60, "response_format": form}
    answer = json.loads(litellm.completion(**asked).choices[0].message.content)
    assert answer["answer"] in ("yes", "no"), answer
    return str(answer)


def refused() -> str:
    """a mistake is litellm's BadRequestError"""
    try:
        litellm.completion(**{**GREEDY, "top_p": 7})
    except litellm.BadRequestError as error:
        told = str(error)
    assert "top_p" in told, told
    return told


def unknown_model() -> str:
    """an unknown model is litellm's NotFoundError"""
    try:
        litellm.completion(**{**GREEDY, "model": "openai/nobody"})
    except litellm.NotFoundError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def embeddings() -> str:
    """embeddings, which there are none of"""
    try:
        litellm.embedding(**COMMON, input=["a"])
    except litellm.NotFoundError as error:
        return str(error)
    raise AssertionError("nothing was raised")


CASES = (
    completion,
    acompletion,
    usage_of_a_stream,
    several,
    logprobs,
    text_completion,
    structured,
    refused,
    unknown_model,
    embeddings,
)

if __name__ == "__main__":
    run(CASES)
