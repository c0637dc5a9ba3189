"""Random requests for a chaos run: plain ones, all that decides a token, several choices, forms and calls.

Only what always has an answer: a wish that leaves nothing to draw would be the client's own mistake.
"""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from proto import client_pb2 as pb

WORD = {"type": "string", "pattern": "^[a-z ]{1,12}$"}
PERSON = {
    "type": "object",
    "properties": {"name": WORD, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMS: tuple[dict[str, Any], ...] = (
    {"json": json.dumps(PERSON)},
    {"json": json.dumps({"type": "array", "items": PERSON, "minItems": 2, "maxItems": 9})},
    {"json_object": True},
    {"regex": "[a-c]{5,60}(x|yz)"},
    {"choice": ["yes", "no", "a much longer answer than these, which takes a while to spell"]},
    {"grammar": 'start: "<" NAME ("," NAME)* ">"\nNAME: /[a-z]{1,9}/'},
)
TOOLS = (
    pb.FunctionTool(name="tell", description="Tell of somebody.", parameters=json.dumps(PERSON), strict=True),
    pb.FunctionTool(name="wave"),
)
LONGEST_SCORED = 300


def random_request(
    rng: random.Random, vocab_size: int, prompt_lengths: Sequence[int], output_lengths: Sequence[int]
) -> pb.GenerateRequest:
    """One of a kind that `rng` picks, always with a seed."""
    prompt = [rng.randrange(vocab_size) for _ in range(rng.choice(prompt_lengths))]
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt),
        max_tokens=rng.choice(output_lengths),
        temperature=rng.choice((0.0, 0.0, 0.8)),
        seed=rng.getrandbits(60),
    )
    add: Callable[[random.Random, pb.GenerateRequest, int], None] = rng.choices(
        (_nothing, _rules, _form, _calls), (4, 3, 2, 2)
    )[0]
    add(rng, request, vocab_size)
    if rng.random() < 0.25:
        request.n = rng.choice((2, 3, 5))
        request.temperature = 0.8
    return request


def _nothing(rng: random.Random, request: pb.GenerateRequest, vocab_size: int) -> None:
    """Plain."""


def _rules(rng: random.Random, request: pb.GenerateRequest, vocab_size: int) -> None:
    """Each part by itself is likely enough to meet each other one."""
    tokens = [rng.randrange(vocab_size) for _ in range(8)]
    parts: list[dict[str, Any]] = [
        {"presence_penalty": 1.5, "frequency_penalty": rng.choice((-0.5, 0.7))},
        {"repetition_penalty": rng.choice((0.8, 1.3))},
        {"logit_bias": {token: rng.choice((-100.0, -3.0, 2.5)) for token in tokens}},
        {"allowed_token_ids": rng.sample(range(vocab_size), vocab_size // 2)},
        {"bad_words": ["a", "e", "to"]},
        {"min_tokens": rng.randrange(request.max_tokens + 1)},
        {"min_p": 0.02, "top_p": 0.95},
        {"top_k": 40},
        {"stop": [chr(rng.randrange(97, 123)) + chr(rng.randrange(97, 123)), "z"]},
        {"stop_token_ids": tokens[:3], "include_stop_str_in_output": rng.random() < 0.5},
        {"ignore_eos": True},
        {"logprobs": 3},
        {"priority": rng.choice((-1, 1))},
    ]
    for part in rng.sample(parts, rng.randrange(1, 6)):
        request.MergeFrom(pb.GenerateRequest(**part))
    if len(request.token_ids.ids) <= LONGEST_SCORED and rng.random() < 0.3:
        request.prompt_logprobs = 2


def _form(rng: random.Random, request: pb.GenerateRequest, vocab_size: int) -> None:
    request.structured_outputs.MergeFrom(pb.StructuredOutputs(**rng.choice(FORMS)))
    if rng.random() < 0.3:
        request.frequency_penalty = 0.5
    if rng.random() < 0.3:
        request.min_tokens = min(5, request.max_tokens)
    if rng.random() < 0.2:
        request.stop.append(rng.choice(('"', "b", ",")))


def _calls(rng: random.Random, request: pb.GenerateRequest, vocab_size: int) -> None:
    text = "".join(chr(rng.randrange(97, 123)) for _ in range(rng.randrange(1, 60)))
    request.chat.messages.append(pb.ChatMessage(role="user", content=text))
    request.tools.extend(TOOLS)
    request.tool_choice = rng.choice(("required", "required", "auto"))
    request.parallel_tool_calls = rng.random() < 0.5
