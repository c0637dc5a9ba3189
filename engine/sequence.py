"""One choice of one request inside an engine: its tokens, its blocks and how far its KV is computed.

tokens       [ prompt ..................... | output ........ ]
KV in blocks [ num_computed .............. ]  to compute
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from core.block_hash import HASH_BLOCK_TOKENS, hash_block, pool_chain
from core.ids import BlockHash, BlockId, HandoffId
from core.sampling import SamplingParams
from core.scores import PromptScore
from engine.guided import Guide
from engine.logit_rules import LogitRules


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(slots=True)
class Sequence:
    """Mutable, owned by one scheduler. Only sequences of one `cache_salt` share blocks. `credit` is how many tokens
    may still be made before the reader must ask for more; `queue_s` is how long it last waited for a step. `arrival`
    numbers a scheduler's sequences; `num_forced` counts those preemptions that a lack of credit does not explain,
    `num_lost` the tokens that were computed before one. `rules` are the runner's, made when they are first needed;
    `guide` is there when params.grammar is. `scores` are of its prompt's tokens, from the runner to whoever reports
    them."""

    id: HandoffId
    tokens: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    fingerprint: str
    choice: int = 0
    cache_salt: bytes = b""
    credit: int = 1 << 30
    arrival: int = 0
    block_ids: list[BlockId] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    num_forced: int = 0
    num_lost: int = 0
    waits_since_s: float | None = None
    queue_s: float = 0.0
    rules: LogitRules | None = None
    guide: Guide | None = None
    scores: list[PromptScore] = field(default_factory=list)
    _chain: list[BlockHash] = field(default_factory=list)

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_to_compute(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def is_able(self) -> bool:
        """Whether a step may make a token of it: its reader takes one, and its grammar is compiled."""
        return self.credit > 0 and (self.guide is None or self.guide.is_ready)

    @property
    def is_scored(self) -> bool:
        """Whether its prompt's tokens are to get scores: every one is computed then, cached or not."""
        return self.params.num_prompt_logprobs >= 0 and self.num_outputs == 0

    @property
    def num_scored(self) -> int:
        """Prompt tokens that a computed token predicts."""
        return min(self.num_computed, self.num_prompt_tokens - 1)

    def take_scores(self) -> list[PromptScore]:
        """Those since the last call."""
        scores, self.scores = self.scores, []
        return scores

    @property
    def seed(self) -> int:
        return self.params.choice_seed(self.choice)

    def know_chain(self, chain: Iterable[BlockHash]) -> None:
        """The hashes of its first hash blocks, from whoever has them already."""
        self._chain = list(chain)

    def chain(self, block_size: int, num_blocks: int) -> list[BlockHash]:
        """The hashes of the first `num_blocks` full blocks of the pool, each that of its last hash block."""
        per_block = block_size // HASH_BLOCK_TOKENS
        while len(self._chain) < num_blocks * per_block:
            start = len(self._chain) * HASH_BLOCK_TOKENS
            parent = self._chain[-1] if self._chain else b""
            ids = self.tokens[start : start + HASH_BLOCK_TOKENS]
            self._chain.append(hash_block(parent, ids, self.fingerprint, salt=self.cache_salt))
        return list(pool_chain(self._chain[: num_blocks * per_block], block_size))

    def max_len(self, context_len: int) -> int:
        """How many tokens it may become, at least one more than it has."""
        whole = max(len(self.tokens) + 1, self.num_prompt_tokens + self.params.max_tokens)
        return min(whole, context_len)

    def finish_reason(self, context_len: int) -> FinishReason | None:
        """Why no token follows the last one, if none does."""
        if self.tokens[-1] in self.params.stop_token_ids and self.num_outputs:
            return FinishReason.STOP
        if self.num_outputs >= self.params.max_tokens or len(self.tokens) >= context_len:
            return FinishReason.LENGTH
        return None
