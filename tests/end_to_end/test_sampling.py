"""Every way to sample, through the tandem and in one process: the same tokens, text, reasons and probabilities."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest
import pytest_asyncio
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from core.errors import InvalidRequest
from core.sampling import SamplingParams
from gateway.ask import TextOptions
from gateway.text.grammar import regex, to_grammar
from gateway.text.text_stream import TextStream
from gateway.text.tokenizer import TextTokenizer
from proto import client_pb2 as pb
from proto import convert
from tandem.testing import LocalCluster
from tests.end_to_end.clients import Client
from tokenizer.files import load_tokenizer_files

EOS = 258
VOCAB = 512
PROMPT = list(b"the quick brown fox jumps over the lazy dog")
LOGPROB_TOLERANCE = 1e-4
NUM_AT_ONCE = 24


@dataclass(frozen=True)
class Asked:
    """One request: what the engine is told, and what only the gateway knows."""

    params: SamplingParams
    prompt_ids: list[int] = field(default_factory=lambda: PROMPT)
    stop: tuple[str, ...] = ()
    includes_stop: bool = False
    ignores_eos: bool = False
    bad_words: tuple[str, ...] = ()
    pattern: str = ""
    n: int = 1

    def message(self) -> pb.GenerateRequest:
        own = self.params
        message = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=self.prompt_ids),
            max_tokens=own.max_tokens,
            temperature=own.temperature,
            top_p=own.top_p,
            top_k=own.top_k,
            min_p=own.min_p,
            seed=own.seed,
            stop=self.stop,
            stop_token_ids=own.stop_token_ids,
            ignore_eos=self.ignores_eos,
            include_stop_str_in_output=self.includes_stop,
            min_tokens=own.min_tokens,
            presence_penalty=own.presence_penalty,
            frequency_penalty=own.frequency_penalty,
            repetition_penalty=own.repetition_penalty,
            logit_bias=dict(own.logit_bias),
            allowed_token_ids=own.allowed_token_ids,
            logprobs=own.num_logprobs,
            bad_words=self.bad_words,
            n=self.n,
            structured_outputs=pb.StructuredOutputs(regex=self.pattern) if self.pattern else None,
        )
        if own.num_prompt_logprobs >= 0:
            message.prompt_logprobs = own.num_prompt_logprobs
        return message


@dataclass(frozen=True)
class Told:
    """What came of it."""

    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[float]
    tops: list[list[int]]
    prompt: list[tuple[float, int, list[int]]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(start_cluster) -> AsyncIterator[LocalCluster]:
    async with start_cluster(num_decode=2) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(cluster, connect) -> AsyncIterator[Client]:
    async with connect(cluster) as connected:
        yield connected


@pytest.fixture(scope="module")
def tokenizer(tiny_model) -> TextTokenizer:
    return TextTokenizer(load_tokenizer_files(tiny_model))


def expected(asked: Asked, one_process: Any, tokenizer: TextTokenizer) -> list[Told | None]:
    """One process, its text cut as the gateway's stream says (which has tests of its own). None for a choice that its
    own parameters leave nothing to draw."""
    ends = () if asked.ignores_eos and not asked.pattern else (EOS,)
    params = replace(
        asked.params,
        stop_token_ids=(*asked.params.stop_token_ids, *ends),
        bad_words=tokenizer.spellings(asked.bad_words),
        grammar=to_grammar(regex("f", asked.pattern)) if asked.pattern else "",
    )
    wanted: list[Told | None] = []
    for index in range(asked.n):
        choice = replace(params, seed=params.choice_seed(index))
        try:
            wanted.append(cut(asked, params, one_process(asked.prompt_ids, choice), tokenizer))
        except InvalidRequest:
            wanted.append(None)
    return wanted


def cut(asked: Asked, params: SamplingParams, done: Any, tokenizer: TextTokenizer) -> Told:
    stream = TextStream(tokenizer, TextOptions(asked.stop, asked.includes_stop), params.min_tokens)
    text, num_tokens = "", 0
    for token in done.token_ids:
        num_tokens += 1
        is_last = num_tokens == len(done.token_ids)
        text += stream.push(token, is_stop_token=is_last and done.finish_reason == "stop")
        if stream.is_stopped:
            break
    text += stream.finish()
    return Told(
        done.token_ids[:num_tokens],
        text,
        "stop" if stream.is_stopped else str(done.finish_reason),
        done.logprobs[:num_tokens],
        [[token for token, _ in top] for top in done.tops[:num_tokens]],
        [(score.logprob, score.rank, [token for token, _ in score.top]) for score in done.prompt_scores],
    )


async def told(client: Client, asked: Asked) -> list[Told] | None:
    """None when it was refused."""
    try:
        answer = await client.stub.Generate(asked.message())
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            return None
        raise
    assert answer.usage.num_completion_tokens == sum(len(choice.token_ids) for choice in answer.choices)
    assert answer.usage.num_prompt_tokens == len(asked.prompt_ids)
    return [
        Told(
            list(choice.token_ids),
            choice.text,
            convert.finish_name(choice.finish_reason),
            [token.logprob for token in choice.logprobs],
            [list(token.top.token_ids) for token in choice.logprobs],
            [(token.logprob, token.rank, list(token.top.token_ids)) for token in choice.prompt_logprobs[1:]],
        )
        for choice in answer.choices
    ]


def assert_all_equal(asked: Asked, actual: list[Told] | None, wanted: list[Told | None]) -> None:
    """One process knows no stop strings: it may have nothing to draw where the tandem has stopped before."""
    if actual is None:
        assert None in wanted
        return
    for one, other in zip(actual, wanted, strict=True):
        if other is not None:
            assert_same(one, other)
        else:
            assert asked.stop and one.finish_reason == "stop"


def assert_same(actual: Told, wanted: Told) -> None:
    assert actual.token_ids == wanted.token_ids
    assert (actual.text, actual.finish_reason) == (wanted.text, wanted.finish_reason)
    assert actual.logprobs == pytest.approx(wanted.logprobs, abs=LOGPROB_TOLERANCE)
    assert actual.tops == wanted.tops
    assert [entry[1:] for entry in actual.prompt] == [entry[1:] for entry in wanted.prompt]
    assert [entry[0] for entry in actual.prompt] == pytest.approx(
        [entry[0] for entry in wanted.prompt], abs=LOGPROB_TOLERANCE
    )


FORCED = ((65, 100.0),)
SPECIAL = {
    "one token": Asked(SamplingParams(1, temperature=0.0)),
    "two tokens": Asked(SamplingParams(2, temperature=0.0)),
    "end of sequence first": Asked(SamplingParams(9, logit_bias=((EOS, 100.0),))),
    "end of sequence first, ignored": Asked(SamplingParams(5, logit_bias=((EOS, 100.0),)), ignores_eos=True),
    "no end before min_tokens": Asked(SamplingParams(9, logit_bias=((EOS, 100.0),), min_tokens=4)),
    "as many as min_tokens": Asked(SamplingParams(4, logit_bias=((EOS, 100.0),), min_tokens=4)),
    "a stop token first": Asked(SamplingParams(9, logit_bias=FORCED, stop_token_ids=(65,))),
    "a stop token first, shown": Asked(
        SamplingParams(9, logit_bias=FORCED, stop_token_ids=(65,)), includes_stop=True
    ),
    "a stop string first": Asked(SamplingParams(9, logit_bias=FORCED), stop=("A",)),
    "a stop string of two tokens": Asked(SamplingParams(9, logit_bias=FORCED), stop=("AA",)),
    "a stop string, shown": Asked(SamplingParams(9, logit_bias=FORCED), stop=("AA",), includes_stop=True),
    "a stop string after min_tokens": Asked(SamplingParams(9, logit_bias=FORCED, min_tokens=3), stop=("A",)),
    "forced by bias": Asked(SamplingParams(6, logit_bias=FORCED, temperature=2.0)),
    "one token allowed": Asked(SamplingParams(6, allowed_token_ids=(66,), temperature=2.0)),
    "probabilities of the first": Asked(SamplingParams(1, num_logprobs=5)),
    "a prompt of one token": Asked(SamplingParams(3, num_logprobs=2, num_prompt_logprobs=2), [72]),
    "a prompt of many chunks": Asked(
        SamplingParams(3, temperature=0.0, num_prompt_logprobs=3), [(7 * i) % 256 for i in range(400)]
    ),
    "a temperature that is almost none": Asked(SamplingParams(6, temperature=1e-12, num_logprobs=1)),
    "a nucleus of one token": Asked(SamplingParams(6, temperature=2.0, top_p=1e-9)),
    "more candidates than tokens": Asked(SamplingParams(6, temperature=2.0, top_k=10**9)),
    "only the likeliest": Asked(SamplingParams(6, temperature=2.0, min_p=1.0)),
    "penalties on what the prompt has": Asked(
        SamplingParams(
            12, temperature=0.0, repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5
        )
    ),
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", SPECIAL)
async def test_a_first_token_in_every_special_position(client, one_process, tokenizer, name):
    asked = SPECIAL[name]
    assert_all_equal(asked, await told(client, asked), expected(asked, one_process, tokenizer))


TOKENS = st.integers(0, VOCAB - 1)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 0.7, 1.0, 2.0]),
    "top_p": st.sampled_from([0.5, 0.95]),
    "top_k": st.sampled_from([1, 5, 100]),
    "min_p": st.sampled_from([0.02, 0.3]),
    "seed": st.integers(0, 2**64 - 1),
    "stop_token_ids": st.lists(TOKENS, max_size=40).map(tuple),
    "min_tokens": st.integers(0, 6),
    "presence_penalty": st.sampled_from([-2.0, 0.5, 2.0]),
    "frequency_penalty": st.sampled_from([-1.0, 0.5, 2.0]),
    "repetition_penalty": st.sampled_from([0.5, 1.2, 3.0]),
    "logit_bias": st.dictionaries(TOKENS, st.floats(-100, 100, width=32), max_size=5).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
    "allowed_token_ids": st.lists(TOKENS, min_size=60, max_size=90).map(tuple),
    "num_logprobs": st.integers(0, 20),
    "num_prompt_logprobs": st.integers(-1, 4),
}
ONLY_GATEWAY: dict[str, st.SearchStrategy[Any]] = {
    "stop": st.sampled_from([("e",), ("ab", "a", "\ufffd")]),
    "includes_stop": st.booleans(),
    "ignores_eos": st.booleans(),
    "bad_words": st.sampled_from([("a",), ("e", "th", "\n")]),
    "pattern": st.sampled_from(["[a-z]{2,9}", "(yes|no|maybe)+", "[0-9]{3}-.*"]),
    "n": st.integers(1, 3),
}
PARAMS = st.fixed_dictionaries({"max_tokens": st.integers(6, 14)}, optional=VALUES).map(
    lambda values: SamplingParams(**values)
)
PROMPTS = st.lists(st.integers(0, 255), min_size=1, max_size=60)
ASKED = st.builds(
    lambda params, prompt, values: Asked(params, prompt, **values),
    PARAMS,
    PROMPTS,
    st.fixed_dictionaries({}, optional=ONLY_GATEWAY),
)
EVERY = {**VALUES, **ONLY_GATEWAY}
PAIRS = [(one, other) for at, one in enumerate(EVERY) for other in list(EVERY)[at + 1 :]]


def assert_all_same(cluster: LocalCluster, batch: list[Asked], one_process: Any, tokenizer: Any) -> None:
    """Many at a time: they are batch mates in both tiers."""

    async def ask_all() -> list[list[Told] | None]:
        places = asyncio.Semaphore(NUM_AT_ONCE)
        async with grpc.aio.insecure_channel(cluster.grpc) as channel:
            client = Client(channel)

            async def ask(asked: Asked) -> list[Told] | None:
                async with places:
                    return await told(client, asked)

            return await asyncio.gather(*map(ask, batch))

    for answer, asked in zip(asyncio.run(ask_all()), batch, strict=True):
        wanted = expected(asked, one_process, tokenizer)
        try:
            assert_all_equal(asked, answer, wanted)
        except AssertionError as error:
            raise AssertionError(f"{asked}: {answer}, not {wanted}") from error


@settings(max_examples=2)
@given(st.fixed_dictionaries(EVERY))
def test_every_pair_of_fields(cluster, one_process, tokenizer, values):
    batch = []
    for at, pair in enumerate(PAIRS):
        params = SamplingParams(8, **{name: values[name] for name in pair if name in VALUES})
        others = {name: values[name] for name in pair if name in ONLY_GATEWAY}
        batch.append(Asked(params, PROMPT[: 5 + at % 30], **others))
    assert_all_same(cluster, batch, one_process, tokenizer)


@settings(
    max_examples=15, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)  # what fails is one in a batch
@given(st.lists(ASKED, min_size=20, max_size=20))
def test_random_combinations(cluster, one_process, tokenizer, batch):
    assert_all_same(cluster, batch, one_process, tokenizer)
