"""A runner without a model, for tests and simulation: a token's KV is a hash of all tokens up to it, and the next
token a function of that. A step checks every KV entry that it attends to: wrong content never goes unseen.
"""

from collections.abc import MutableSequence
from collections.abc import Sequence as Seq

from core.ids import HandoffId
from core.sampling import SamplingParams
from engine.scheduler import Sampled, Work

VOCAB_SIZE = 997
_MASK = (1 << 64) - 1


class HashRunner:
    """Keeps the KV of a pool of `num_blocks` blocks of `block_size` tokens. Raises AssertionError when a step reads
    what was never written there, or runs past the end of a sequence."""

    def __init__(self, num_blocks: int, block_size: int, kv: MutableSequence[int] | None = None) -> None:
        """`kv` is memory to use instead of its own: one unsigned 64-bit number for each token of the pool."""
        self._block_size = block_size
        self._kv: MutableSequence[int] = [0] * (num_blocks * block_size) if kv is None else kv

    def run(self, work: Seq[Work]) -> dict[HandoffId, Sampled]:
        sampled: dict[HandoffId, Sampled] = {}
        for item in work:
            state = self._forward(item)
            if item.needs_token:
                sequence = item.sequence
                token_id = draw(state, sequence.params, sequence.seed, sequence.num_outputs)
                sampled[sequence.id] = Sampled(token_id, -1.0, True)
        return sampled

    def _forward(self, item: Work) -> int:
        """Write the KV of the item's tokens; the state after the last of them."""
        sequence, start = item.sequence, item.sequence.num_computed
        end = start + item.num_tokens
        assert 0 <= start < end <= len(sequence.tokens), (start, end, len(sequence.tokens))
        state = 0
        for position, token_id in enumerate(sequence.tokens[:end]):
            state = _extend(state, token_id)
            block = sequence.block_ids[position // self._block_size]
            slot = block * self._block_size + position % self._block_size
            if position >= start:
                self._kv[slot] = state
            assert self._kv[slot] == state, f"{sequence.id}: KV of token {position} is not in block {block}"
        return state


def draw(state: int, params: SamplingParams, seed: int, position: int) -> int:
    """The token after `state`; of seed and position as well unless it is greedy."""
    return (state if params.is_greedy else _extend(_extend(state, seed), position)) % VOCAB_SIZE


def expected_outputs(prompt_ids: Seq[int], params: SamplingParams, context_len: int) -> list[int]:
    """What one sequence alone generates after the prompt."""
    state = 0
    for token_id in prompt_ids:
        state = _extend(state, token_id)
    outputs: list[int] = []
    while len(outputs) < params.max_tokens and len(prompt_ids) + len(outputs) < context_len:
        outputs.append(draw(state, params, params.choice_seed(0), len(outputs)))
        if outputs[-1] in params.stop_token_ids:
            break
        state = _extend(state, outputs[-1])
    return outputs


def _extend(state: int, token_id: int) -> int:
    mixed = ((state ^ (token_id + 1)) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & _MASK
    return mixed ^ (mixed >> 29)
