"""What a sequence's parameters change in its logits before a token is drawn: kept up with its tokens, on the host.

A LogitRules belongs to one sequence and learns each of its tokens once. The rules of a batch's rows make LogitEdits,
flat arrays that `engine.logit_edits` applies to all of them at once. No torch.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from core.sampling import SamplingParams
from engine.guided import Guide
from tokenizer.grammar import Mask

Ids = npt.NDArray[np.int64]


class TokenCounts:
    """Which tokens a growing sequence has, and how often its output has each."""

    def __init__(self, prompt: Seq[int]) -> None:
        self._slots = {int(token): slot for slot, token in enumerate(dict.fromkeys(prompt))}
        self._size = len(self._slots)
        self._ids = np.fromiter(self._slots, np.int64, self._size)
        self._counts = np.zeros(self._size, np.int64)

    def add(self, token: int) -> None:
        """One more token of the output."""
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = self._size
            self._grow()
            self._ids[slot] = token
        self._counts[slot] += 1

    @property
    def ids(self) -> Ids:
        """[n], each token once; valid until the next add()."""
        return self._ids[: self._size]

    @property
    def counts(self) -> Ids:
        """[n]: occurrences in the output; 0 for a token that only the prompt has."""
        return self._counts[: self._size]

    def _grow(self) -> None:
        if self._size == len(self._ids):
            room = np.zeros(max(64, self._size), np.int64)
            self._ids, self._counts = np.append(self._ids, room), np.append(self._counts, room)
        self._size += 1


class LogitRules:
    """Of one sequence whose params.changes_logits. `tokens` may only grow from call to call."""

    def __init__(self, params: SamplingParams, guide: Guide | None = None) -> None:
        self.params = params
        self.guide = guide
        self.allowed = np.unique(np.array(params.allowed_token_ids, np.int64))
        self.bias_ids = np.array([token for token, _ in params.logit_bias], np.int64)
        self.biases = np.array([bias for _, bias in params.logit_bias], np.float32)
        self._stop_ids = np.array(params.stop_token_ids, np.int64)
        self._counts: TokenCounts | None = None
        self._num_seen = 0

    def counts(self, tokens: Seq[int], num_prompt_tokens: int) -> TokenCounts:
        """Of prompt and output, up to the end of `tokens`."""
        if self._counts is None:
            self._counts, self._num_seen = TokenCounts(tokens[:num_prompt_tokens]), num_prompt_tokens
        for token in tokens[self._num_seen :]:
            self._counts.add(token)
        self._num_seen = len(tokens)
        return self._counts

    def mask(self, tokens: Seq[int], num_prompt_tokens: int) -> Mask | None:
        """What the grammar lets follow, if there is one; valid until the next call."""
        return None if self.guide is None else self.guide.mask(tokens[num_prompt_tokens:])

    def banned(self, tokens: Seq[int], num_prompt_tokens: int) -> Ids:
        """What must not follow: the end of a bad word, and a stop token before there are min_tokens, unless by the
        grammar nothing else may follow."""
        num_outputs = len(tokens) - num_prompt_tokens
        ends = [
            word[-1]
            for word in self.params.bad_words
            if len(word) <= num_outputs + 1 and tuple(tokens[len(tokens) - len(word) + 1 :]) == word[:-1]
        ]
        is_complete = self.guide is not None and self.guide.is_complete
        if num_outputs < self.params.min_tokens and not is_complete:
            return np.concatenate((np.array(ends, np.int64), self._stop_ids))
        return np.array(ends, np.int64)


@dataclass(frozen=True, slots=True)
class Entries:
    """Sparse entries of a batch's logits: entry i is token ids[i] of row rows[i]; no pair occurs twice."""

    rows: Ids
    ids: Ids

    @classmethod
    def join(cls, ids_by_row: Seq[Ids]) -> "Entries":
        sizes = [len(ids) for ids in ids_by_row]
        ids = np.concatenate([np.empty(0, np.int64), *ids_by_row])
        return cls(np.repeat(np.arange(len(sizes)), sizes), ids)

    def __len__(self) -> int:
        return len(self.ids)


class RuledRow(NamedTuple):
    """One row's rules and the tokens that its sequence has now."""

    rules: LogitRules
    tokens: Seq[int]
    num_prompt_tokens: int

    @property
    def banned(self) -> Ids:
        return np.unique(self.rules.banned(self.tokens, self.num_prompt_tokens))


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """What changes in the logits of R rows, in the order in which it is applied."""

    masked: Ids  # [G]: the rows that follow a grammar
    masks: npt.NDArray[np.uint8]  # [G, ceil(V / 8) or more]: bit t % 8 of byte t // 8: token t may be drawn
    allowed: dict[int, Ids]  # row -> the only tokens that may be drawn
    banned: Entries
    biased: Entries
    biases: npt.NDArray[np.float32]  # [len(biased)]
    counted: Entries
    counts: Ids  # [len(counted)]: occurrences in the output
    repetition: npt.NDArray[np.float32]  # [len(counted)]
    frequency: npt.NDArray[np.float32]  # [len(counted)]
    presence: npt.NDArray[np.float32]  # [len(counted)]
    log_min_ps: npt.NDArray[np.float32]  # [R]: the smallest (logit - peak) allowed; -inf: all are

    @classmethod
    def build(cls, rows: Seq[RuledRow]) -> "LogitEdits":
        params = [row.rules.params for row in rows]
        masks = [
            row.rules.mask(row.tokens, row.num_prompt_tokens) for row in rows
        ]  # first: others look at the guide
        counts = [
            row.rules.counts(row.tokens, row.num_prompt_tokens) if own.has_penalties else None
            for row, own in zip(rows, params, strict=True)
        ]
        counted = Entries.join([_NO_IDS if own is None else own.ids for own in counts])
        given = [mask.view(np.uint8) for mask in masks if mask is not None]
        return cls(
            masked=np.array([index for index, mask in enumerate(masks) if mask is not None], np.int64),
            masks=np.stack(given) if given else np.empty((0, 0), np.uint8),
            allowed={index: row.rules.allowed for index, row in enumerate(rows) if len(row.rules.allowed)},
            banned=Entries.join([row.banned for row in rows]),
            biased=Entries.join([row.rules.bias_ids for row in rows]),
            biases=np.concatenate([np.empty(0, np.float32), *(row.rules.biases for row in rows)]),
            counted=counted,
            counts=np.concatenate([_NO_IDS, *(own.counts for own in counts if own is not None)]),
            repetition=_column([own.repetition_penalty for own in params], counted),
            frequency=_column([own.frequency_penalty for own in params], counted),
            presence=_column([own.presence_penalty for own in params], counted),
            log_min_ps=np.array([_log_min_p(own) for own in params], np.float32),
        )


_NO_IDS = np.empty(0, np.int64)


def _column(values: Seq[float], entries: Entries) -> npt.NDArray[np.float32]:
    """Each entry's value of its row."""
    return np.array(values, np.float32)[entries.rows]


def _log_min_p(params: SamplingParams) -> float:
    """In logits: probabilities after temperature are e^(logit / temperature)."""
    if params.min_p == 0.0 or params.is_greedy:
        return -np.inf
    return float(np.log(params.min_p) * params.temperature)
