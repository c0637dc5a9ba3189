"""What a chaos run asks, and what is wrong with the answers."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch

from core.sampling import SamplingParams
from engine.llm import LLM
from engine.model_config import load_model_config
from gateway.tokenizer import TextTokenizer
from tokenizer.files import load_tokenizer_files

HANG_S = 70.0
JUDGED_AT_ONCE = 20
TYPED = {"busy", "unavailable", "transfer_failed", "worker_lost", "deadline_exceeded"}


@dataclass(frozen=True)
class Asks:
    """What the model can be asked: random ids below `vocab_size`, as long as a step of it allows."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    prompt_lengths: tuple[int, ...]
    output_lengths: tuple[int, ...]

    @classmethod
    def of(cls, path: Path, is_tiny: bool) -> "Asks":
        return cls(
            load_model_config(path).vocab_size,
            TextTokenizer(load_tokenizer_files(path)).eos_token_ids,
            (1, 15, 16, 17, 40, 100, 300, 700) if is_tiny else (1, 5, 15, 16, 17, 33),
            (1, 2, 8, 60, 200) if is_tiny else (1, 2, 4, 12),
        )


@dataclass
class Record:
    """One request, from being asked to its end."""

    prompt: list[int]
    max_tokens: int
    seed: int
    temperature: float
    leaves_after_s: float | None
    faults_meanwhile: list[str] = field(default_factory=list)
    outcome: str = ""
    tokens: list[int] = field(default_factory=list)
    num_ends: int = 0
    took_s: float = 0.0


def judge(records: list[Record], llm: LLM, asks: Asks) -> list[str]:
    """What is wrong, one line each."""
    wrong = []
    for index, (record, expected) in enumerate(zip(records, answers(records, llm, asks), strict=True)):
        is_whole = record.outcome.startswith("right")
        if record.num_ends != 1:
            wrong.append(f"request {index} ({record.outcome}) had {record.num_ends} ends")
        if record.tokens != (expected if is_whole else expected[: len(record.tokens)]):
            wrong.append(f"request {index} ({record.outcome}): wrong tokens")
        if not is_whole and record.outcome not in TYPED | {"client left"}:
            wrong.append(f"request {index} ended with {record.outcome}")
        if record.took_s > HANG_S:
            wrong.append(f"request {index} took {record.took_s:.0f} s")
    return wrong


def answers(records: list[Record], llm: LLM, asks: Asks) -> list[list[int]]:
    """What one process makes of each, several at a time: with a real model that is the longer half of a run."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    ends = asks.eos_token_ids
    params = [SamplingParams(r.max_tokens, r.temperature, seed=r.seed, stop_token_ids=ends) for r in records]
    made = []
    for first in range(0, len(records), JUDGED_AT_ONCE):
        few = slice(first, first + JUDGED_AT_ONCE)
        made += llm.generate([record.prompt for record in records[few]], params[few])
    return [completion.token_ids for completion in made]
