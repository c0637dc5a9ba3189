"""Offline inference: the engine without services, on the tiny model."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.errors import EngineFailed, InvalidRequest
from core.kv_spec import DType
from core.sampling import SamplingParams
from engine.config import EngineConfig
from engine.llm import LLM
from engine.scheduler import Sampled
from engine.sequence import FinishReason

GREEDY = SamplingParams(12, temperature=0.0)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    """A pool so small that some of the tests' batches need preemption."""
    made = LLM(EngineConfig(str(tiny_model), DType.FLOAT32, num_blocks=24, token_budget=64, max_batch=8))
    yield made
    made.close()


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


def test_a_batch_gives_each_prompt_what_it_gets_alone(llm, oracle):
    prompts = prompts_of(1, 15, 16, 17, 40, 100, 3)
    completions = llm.generate(prompts, GREEDY)
    assert [completion.token_ids for completion in completions] == [oracle(p, max_tokens=12) for p in prompts]
    assert all(completion.finish_reason is FinishReason.LENGTH for completion in completions)
    assert all(len(completion.logprobs) == 12 for completion in completions)


def test_more_output_than_the_pool_holds_at_once_is_still_right(llm, oracle):
    prompts = prompts_of(40, 41, 42, 43, 44)
    completions = llm.generate(prompts, SamplingParams(90, temperature=0.0))
    assert [completion.token_ids for completion in completions] == [oracle(p, max_tokens=90) for p in prompts]


def test_what_parameters_make_of_the_tokens_so_far_outlives_preemption(llm, one_process):
    prompts = prompts_of(40, 41, 42, 43, 44)
    params = SamplingParams(
        90,
        seed=3,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        bad_words=((7, 8), (9,)),
        min_tokens=90,
        stop_token_ids=(11,),
        num_prompt_logprobs=1,
    )
    completions = llm.generate(prompts, params)
    expected = [one_process(prompt, params) for prompt in prompts]
    assert [done.token_ids for done in completions] == [alone.token_ids for alone in expected]
    assert [done.prompt_scores for done in completions] == [alone.prompt_scores for alone in expected]


def test_each_prompt_may_have_its_own_parameters(llm, oracle):
    prompts = prompts_of(20, 20)
    seeded = SamplingParams(8, temperature=0.8, seed=11)
    first, second = llm.generate(prompts, [GREEDY, seeded])
    assert first.token_ids == oracle(prompts[0], max_tokens=12)
    assert second.token_ids == oracle(prompts[1], max_tokens=8, temperature=0.8, seed=11)


def test_a_repeated_prompt_is_found_in_the_cache(llm):
    (prompt,) = prompts_of(70)
    cold = llm.generate([prompt], GREEDY)[0]
    warm = llm.generate([prompt], GREEDY)[0]
    assert warm.num_cached_tokens == 64
    assert warm.token_ids == cold.token_ids


def test_a_stop_token_ends_the_output_and_is_part_of_it(llm, oracle):
    (prompt,) = prompts_of(30)
    whole = oracle(prompt, max_tokens=12)
    stopped = llm.generate([prompt], SamplingParams(12, 0.0, stop_token_ids=(whole[4],)))[0]
    assert stopped.token_ids == whole[: whole.index(whole[4]) + 1]
    assert stopped.finish_reason is FinishReason.STOP


def test_an_output_is_cut_to_what_the_pool_holds(llm):
    (prompt,) = prompts_of(380)
    assert len(llm.generate([prompt], SamplingParams(100, 0.0))[0].token_ids) == 4


@pytest.mark.parametrize("length", [0, 384, 5000])
def test_a_prompt_that_can_never_run_is_refused_before_any_work(llm, length):
    with pytest.raises(InvalidRequest):
        llm.generate([[1, 2, 3], [1] * length], GREEDY)
    assert not llm.engine.scheduler.has_work


def test_nothing_in_nothing_out(llm):
    assert llm.generate([], GREEDY) == []


class NotFinite:
    def __init__(self, runner):
        self._runner = runner

    def run(self, work):
        drawn = self._runner.run(work)
        return {key: Sampled(token.token_id, token.logprob, False) for key, token in drawn.items()}


def test_an_error_ends_every_prompt_of_the_call_and_the_engine_can_be_used_again(llm, oracle):
    prompts = prompts_of(20, 30, 40)
    runner = llm.engine.runner
    llm.engine.runner = NotFinite(runner)
    with pytest.raises(EngineFailed):
        llm.generate(prompts, GREEDY)
    llm.engine.runner = runner
    pool = llm.engine.scheduler.pool
    pool.check()
    assert pool.num_available == pool.num_blocks
    assert llm.generate(prompts[:1], GREEDY)[0].token_ids == oracle(prompts[0], max_tokens=12)
