"""Answers with many log-probabilities: made beside the event loop, bounded, and the same as small ones."""

import asyncio
import json
import time

import pytest

from core.errors import InvalidRequest
from core.sampling import SamplingParams
from core.scores import PromptScore
from gateway.ask import Ask, Prompt
from gateway.front.openai_objects import CompletionShape, Envelope
from gateway.front.rendering import MAX_INLINE, num_logprobs
from gateway.text_generation import EchoedPrompt, TextChunk

SCORE = PromptScore(-1.0, 2, tuple((token, -float(token)) for token in range(20)))


def scored(choice: int, num_tokens: int) -> list[TextChunk]:
    prompt = EchoedPrompt("", (65,) * num_tokens, (SCORE,) * (num_tokens - 1))
    return [TextChunk("", (), "length", choice=choice, prompt=prompt)]


async def test_large_answers_leave_the_loop_to_others_and_say_what_small_ones_do(served):
    ask = Ask("m", (Prompt("prompt", text="x"),), n=4, best_of=4)
    answer = await served.serving.prepare(ask)
    envelope = Envelope(CompletionShape(served.serving.tokenizer, ask), answer, "m")
    beats: list[float] = []
    beating = asyncio.create_task(beat(beats))
    rendered = await envelope.whole([scored(choice, 1500) for choice in range(4)])
    beating.cancel()
    assert len(beats) > 10, "nobody else would have had a turn"
    whole = json.loads(rendered)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert whole["usage"]["completion_tokens"] == 0
    small = scored(0, 60)
    assert num_logprobs(small) < MAX_INLINE < num_logprobs(scored(0, 1500))
    (same,) = json.loads(await envelope.whole([small]))["choices"]
    assert same["prompt_logprobs"] == whole["choices"][0]["prompt_logprobs"][:60]


async def test_no_answer_repeats_a_prompts_scores_without_bound(served):
    scores = SamplingParams(1, num_prompt_logprobs=20)
    with pytest.raises(InvalidRequest) as caught:
        await served.serving.prepare(
            Ask("m", (Prompt("prompt", token_ids=(1,) * 500),), 1, scores, n=120, best_of=120)
        )
    assert caught.value.field == "prompt_logprobs"
    await served.serving.prepare(
        Ask("m", (Prompt("prompt", token_ids=(1,) * 500),), 1, scores, n=90, best_of=90)
    )


async def beat(beats: list[float]) -> None:
    while True:
        await asyncio.sleep(0.001)
        beats.append(time.perf_counter())
