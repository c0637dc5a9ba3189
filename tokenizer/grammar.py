"""Grammars over a model's tokens: one way to compile them for the gateway, which judges them, and the engine, which
follows them. Knows nothing of requests.

A grammar is Lark in llguidance's dialect; `lark()` makes one of rules. Everything about it is bounded by LIMITS, but
for the stack: compiling something nested deeply enough ends the process. So a grammar is judged in a process that may
end, on a stack of CHECK_STACK_BYTES, and compiled by engines in a thread that has COMPILE_STACK_BYTES.
"""

import re

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from core.errors import EngineFailed, InvalidRequest
from tokenizer.files import TokenizerFiles

CHECK_STACK_BYTES = 4 << 20
COMPILE_STACK_BYTES = 32 << 20
LIMITS = LLParserLimits(
    max_items_in_row=1000,
    step_max_items=10_000,
    max_lexer_states=50_000,
    max_grammar_size=30_000,
    verbose_errors=False,
)
"""They keep compiling below a second, and a mask of the most ambiguous grammar below about 50 ms; a usual one takes a
tenth of a millisecond."""
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
MAX_MESSAGE_LEN = 300
_SOURCE = re.compile(r"\n *\d+ \| |\n<")  # where a message goes on to quote the grammar, or dumps state

Mask = npt.NDArray[np.int32]
"""[ceil(V / 32)]: bit t % 32 of word t // 32 says whether token t may be drawn."""


def lark(rules: str) -> str:
    """The grammar of Lark rules that begin at `start`. Without forcing: a text that has one possible continuation
    would cost time in its length at every token."""
    return rules + _OPTIONS


def build_tokenizer(files: TokenizerFiles, vocab_size: int = 0) -> LLTokenizer:
    """For logits of `vocab_size`, or as many as the vocabulary has if that is more. Takes up to a second and keeps
    other threads from running. Raises EngineFailed when the vocabulary is not understood, or has no end."""
    if not files.eos_token_ids:
        raise EngineFailed(
            "the model has no end-of-sequence token, so no output can end where a grammar does"
        )
    size = max(vocab_size, files.tokenizer.get_vocab_size())
    try:
        return LLTokenizer(files.tokenizer.to_str(), n_vocab=size, eos_token=list(files.eos_token_ids))
    except ValueError as error:
        raise EngineFailed(f"no grammars over this vocabulary: {error}") from error


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the start of an output. Lets other threads run meanwhile. Raises InvalidRequest (field `grammar`)
    for what is no grammar, is beyond the limits, or allows no output at all."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise InvalidRequest("grammar", matcher_error(matcher))
    return matcher


def matcher_error(matcher: LLMatcher) -> str:
    """Why it follows its grammar no further, on one line; empty unless it failed."""
    message = _SOURCE.split(matcher.get_error())[0]
    if message.startswith("NoExtension"):
        return "no output satisfies it"
    return " ".join(message.split())[:MAX_MESSAGE_LEN]


def new_mask(vocab_size: int) -> Mask:
    return np.zeros(-(-vocab_size // 32), np.int32)


def fill_mask(matcher: LLMatcher, mask: Mask) -> None:
    """What may come next. `mask` is one of new_mask(), made for the size of the matcher's tokenizer."""
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
