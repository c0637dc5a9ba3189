"""What a chaos run asks, and what is wrong with the answers."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from core.sampling import SamplingParams
from engine.llm import LLM, Completion
from engine.model_config import load_model_config
from gateway.ask import Ask
from gateway.front.grpc_schema import to_ask
from gateway.generation import GenerationRequest, OutputToken
from gateway.text.grammar import to_grammar
from gateway.text.text_stream import TextStream
from gateway.text.tokenizer import TextTokenizer
from gateway.text.tool_calls import ToolCallParser
from gateway.text.tool_grammar import tool_form
from gateway.text_generation import TextGeneration
from proto import client_pb2 as pb
from tests.chaos.told import Made, Told
from tokenizer.files import load_tokenizer_files

HANG_S = 70.0
JUDGED_AT_ONCE = 20
TYPED = {"busy", "unavailable", "transfer_failed", "worker_lost", "deadline_exceeded"}


@dataclass(frozen=True)
class Asks:
    """What the model can be asked: random ids below `vocab_size`, as long as a step of it allows."""

    vocab_size: int
    context_len: int
    tokenizer: TextTokenizer
    prompt_lengths: tuple[int, ...]
    output_lengths: tuple[int, ...]

    @classmethod
    def of(cls, path: Path, is_tiny: bool) -> "Asks":
        config = load_model_config(path)
        return cls(
            config.vocab_size,
            config.context_len,
            TextTokenizer(load_tokenizer_files(path)),
            (1, 15, 16, 17, 40, 100, 300, 700) if is_tiny else (1, 5, 15, 16, 17, 33),
            (1, 2, 8, 60, 200, 600) if is_tiny else (1, 2, 4, 12),
        )


@dataclass
class Record:
    """One request, from being asked to its end. Who leaves does so by going away, or by AbortRequest; who comes back
    breaks its connection and resumes the stream."""

    request: pb.GenerateRequest
    leaves_after_s: float | None = None
    aborts_after_s: float | None = None
    request_id: str = ""
    faults_meanwhile: list[str] = field(default_factory=list)
    outcome: str = ""
    told: dict[int, Told] = field(default_factory=dict)
    num_ends: int = 0
    took_s: float = 0.0

    @property
    def is_whole(self) -> bool:
        return self.outcome.startswith("right")

    @property
    def num_choices(self) -> int:
        return max(self.request.n, 1)

    def take(self, choice: pb.Choice) -> None:
        self.told.setdefault(choice.index, Told()).take(choice)


def judge(records: Sequence[Record], llm: LLM, asks: Asks) -> list[str]:
    """What is wrong, one line each."""
    wrong = []
    for index, (record, expected) in enumerate(zip(records, answers(records, llm, asks), strict=True)):
        name = f"request {index} ({record.outcome})"
        if record.num_ends != 1:
            wrong.append(f"{name} had {record.num_ends} ends")
        allowed = TYPED | ({"client left"} if record.leaves_after_s is not None else set())
        allowed |= {"cancelled"} if record.aborts_after_s is not None else set()
        if not record.is_whole and record.outcome not in allowed:
            wrong.append(f"{name} ended with {record.outcome}")
        if record.took_s > HANG_S:
            wrong.append(f"{name} took {record.took_s:.0f} s")
        for choice, own in enumerate(expected):
            told = record.told.get(choice, Told())
            if difference := told.difference(own, record.is_whole):
                wrong.append(f"{name}, choice {choice}: wrong {difference}\n{told}\n{own}\n{record.request}")
            if record.is_whole and told.num_ends != 1:
                wrong.append(f"{name}, choice {choice} had {told.num_ends} finish reasons")
    return wrong


def answers(records: Sequence[Record], llm: LLM, asks: Asks) -> list[list[Told]]:
    """What one process makes of each one's choices, several at a time: with a real model that is the longer half of a
    run."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    wanted = [own for record in records for own in wanted_choices(record, asks)]
    made: list[Completion] = []
    for first in range(0, len(wanted), JUDGED_AT_ONCE):
        few = wanted[first : first + JUDGED_AT_ONCE]
        made += llm.generate([own.ids for own in few], [own.params for own in few])
    told = iter([own.told(completion, asks) for own, completion in zip(wanted, made, strict=True)])
    return [[next(told) for _ in range(record.num_choices)] for record in records]


@dataclass(frozen=True)
class Wanted:
    """One choice of a request, as one process is asked for it."""

    ask: Ask
    ids: tuple[int, ...]
    params: SamplingParams

    def told(self, completion: Completion, asks: Asks) -> Told:
        """The completion's tokens as the gateway would tell them: stopped, as text, with calls read from it."""
        chat = self.ask.prompts[0].chat
        tools = chat.tools if chat is not None else None
        calls = None
        if tools is not None:
            calls = ToolCallParser(asks.tokenizer.tool_format, tools.callable_names, tools.allows_several)
        last = len(completion.token_ids) - 1
        made = Made(
            GenerationRequest(self.ids, self.params),
            completion.prompt_scores,
            [
                OutputToken(0, at, token, logprob, completion.finish_reason if at == last else "")
                for at, (token, logprob) in enumerate(
                    zip(completion.token_ids, completion.logprobs, strict=True)
                )
            ],
        )
        text = TextStream(asks.tokenizer, self.ask.text, self.params.min_tokens)
        generation = TextGeneration(0, made, text, frozenset(), calls=calls)  # type: ignore[arg-type]
        return asyncio.run(_tell(generation, self.ask.wants_logprobs))


async def _tell(generation: TextGeneration, tells_logprobs: bool) -> Told:
    told = Told()
    async for chunk in generation.chunks():
        told.take_chunk(chunk, tells_logprobs)
    return told


def wanted_choices(record: Record, asks: Asks) -> list[Wanted]:
    """With everything that the gateway adds to what the client wrote."""
    ask = to_ask(record.request, "test", is_stream=True)
    (prompt,) = ask.prompts
    known = asks.tokenizer
    ids = prompt.token_ids or () if prompt.chat is None else tuple(known.encode_chat(prompt.chat))
    form = ask.form
    if prompt.chat is not None and prompt.chat.tools is not None:
        form = tool_form(known.tool_format, prompt.chat.tools, form, known.added_tokens, known.markup_tokens)
    ends = () if ask.ignores_eos and form is None else known.eos_token_ids
    assert ask.seed is not None and ask.max_tokens is not None
    params = replace(
        ask.sampling,
        max_tokens=min(ask.max_tokens, asks.context_len - len(ids)),
        grammar=to_grammar(form) if form is not None else "",
        seed=ask.seed,
        stop_token_ids=tuple(dict.fromkeys((*ask.sampling.stop_token_ids, *ends))),
        bad_words=known.spellings(ask.bad_words),
    )
    return [
        Wanted(ask, ids, replace(params, seed=params.choice_seed(choice)))
        for choice in range(record.num_choices)
    ]
