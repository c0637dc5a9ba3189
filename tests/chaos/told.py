"""What one choice has said, from the messages of a cluster or from the tokens of one process: the same words."""

import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from core.scores import PromptScore
from gateway.generation import GenerationRequest, OutputToken
from gateway.routing.live import HandoffReport
from proto import client_pb2 as pb
from proto import convert

LOGPROB_TOLERANCE = 1e-3


@dataclass
class Told:
    """`calls` are names and arguments, `scores` the prompt's (log-probability, rank)."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    calls: list[list[str]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    scores: list[tuple[float, int]] = field(default_factory=list)
    finish_reason: str = ""
    num_ends: int = 0

    def take(self, choice: pb.Choice) -> None:
        """What a message adds."""
        self.tokens += choice.token_ids
        self.text += choice.text
        self.logprobs += [token.logprob for token in choice.logprobs]
        self.scores += [(score.logprob, score.rank) for score in choice.prompt_logprobs if score.rank]
        for call in choice.tool_calls:
            self._take_call(call.index, call.name, call.arguments)
        if choice.finish_reason:
            self.finish_reason = convert.finish_name(choice.finish_reason)
            self.num_ends += 1

    def take_chunk(self, chunk: Any, tells_logprobs: bool) -> None:
        """The same of a TextChunk."""
        self.tokens += chunk.token_ids
        self.text += chunk.text
        self.logprobs += [token.logprob for token in chunk.tokens] if tells_logprobs else []
        if chunk.prompt is not None:
            self.scores += [(score.logprob, score.rank) for score in chunk.prompt.scores]
        for call in chunk.calls:
            self._take_call(call.index, call.name, call.arguments)
        if chunk.finish_reason:
            self.finish_reason = chunk.finish_reason
            self.num_ends += 1

    def _take_call(self, index: int, name: str, arguments: str) -> None:
        if index == len(self.calls):
            self.calls.append(["", ""])
        self.calls[index][0] += name
        self.calls[index][1] += arguments

    def difference(self, expected: "Told", is_whole: bool) -> str:
        """What of this is not as in `expected`, or not as its beginning; empty when all is."""
        parts = {
            "tokens": _agree(self.tokens, expected.tokens, is_whole),
            "text": _agree(self.text, expected.text, is_whole),
            "calls": self._calls_agree(expected, is_whole),
            "log-probabilities": _near(self.logprobs, expected.logprobs, is_whole),
            "scores": not self.scores or self._scores_agree(expected),
            "finish reason": self.finish_reason == expected.finish_reason or not is_whole,
        }
        if is_whole and len(self.scores) != len(expected.scores):
            parts["scores"] = False
        return ", ".join(name for name, agrees in parts.items() if not agrees)

    def _calls_agree(self, expected: "Told", is_whole: bool) -> bool:
        if is_whole or not self.calls:
            return self.calls == (expected.calls if is_whole else [])
        *begun, last = self.calls
        mate = expected.calls[len(begun)] if len(expected.calls) > len(begun) else ["", ""]
        return begun == expected.calls[: len(begun)] and last[0] == mate[0] and mate[1].startswith(last[1])

    def _scores_agree(self, expected: "Told") -> bool:
        ranks = [rank for _, rank in self.scores] == [rank for _, rank in expected.scores]
        return ranks and _near([one for one, _ in self.scores], [one for one, _ in expected.scores], True)


def _agree(given: Sequence[Any], expected: Sequence[Any], is_whole: bool) -> bool:
    return given == (expected if is_whole else expected[: len(given)])


def _near(given: Sequence[float], expected: Sequence[float], is_whole: bool) -> bool:
    if len(given) > len(expected) or (is_whole and len(given) != len(expected)):
        return False
    pairs = zip(given, expected[: len(given)], strict=True)
    return all(math.isclose(one, other, abs_tol=LOGPROB_TOLERANCE) for one, other in pairs)


@dataclass
class Made:
    """Stands where a Generation does, with the tokens of one process."""

    request: GenerationRequest
    prompt_scores: Sequence[PromptScore]
    made: Sequence[OutputToken]
    report: HandoffReport = field(default_factory=HandoffReport)

    async def tokens(self) -> AsyncGenerator[OutputToken, None]:
        for token in self.made:
            yield token
