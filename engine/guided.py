"""Where a sequence is in its grammar, and what may follow. Knows nothing of logits, schedules or torch.

GuideFactory.guide(grammar) ─► Guide: compiling, in the factory's thread ─► ready ─► mask() for each further token
                                                                      └──► error: no grammar, or too much of one
"""

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from llguidance import LLMatcher, LLTokenizer

from core.clock import Clock
from core.errors import InvalidRequest, TandemError
from tokenizer.files import load_tokenizer_files
from tokenizer.grammar import (
    COMPILE_STACK_BYTES,
    Mask,
    build_tokenizer,
    compile_grammar,
    fill_mask,
    matcher_error,
    new_mask,
)


class Compiled(NamedTuple):
    """A matcher, and room for what it says may follow."""

    matcher: LLMatcher
    mask: Mask


class Guide:
    """Of one sequence. Belongs to the engine's thread but for the compiling. Two of one grammar share nothing: what
    one sequence makes of it must not spend another's limits. `mask_s` is the processor time of the latest
    mask; `turn` is MaskShare's."""

    def __init__(self, compiled: Future[Compiled], clock: Clock = time.thread_time) -> None:
        self.mask_s = 0.0
        self.turn = 0
        self._compiled = compiled
        self._clock = clock
        self._num_followed = 0

    @property
    def is_ready(self) -> bool:
        """Whether it needs no more waiting: it leads, or has an error."""
        return self._compiled.done()

    @property
    def error(self) -> TandemError | None:
        """Why it does not lead (any more). None while it compiles."""
        if not self.is_ready:
            return None
        failure = self._compiled.exception()
        if failure is not None:
            assert isinstance(failure, TandemError), failure
            return failure
        message = matcher_error(self._compiled.result().matcher)
        return (
            InvalidRequest("grammar", f"the grammar cannot be followed further: {message}")
            if message
            else None
        )

    @property
    def is_complete(self) -> bool:
        """Whether nothing but the end may follow."""
        return self.error is None and bool(self._compiled.result().matcher.is_stopped())

    def wait(self) -> None:
        """Until it is ready."""
        self._compiled.exception()

    def mask(self, output_ids: Seq[int]) -> Mask:
        """What may follow these, which may only grow from call to call; at least as wide as the logits. Once the
        grammar is complete that is the model's ends of sequence; nothing at all after an error. Valid until the next
        call."""
        matcher, mask = self._compiled.result()
        began_s = self._clock()
        matcher.consume_tokens(list(output_ids[self._num_followed :]))
        self._num_followed = len(output_ids)
        fill_mask(matcher, mask)
        self.mask_s = self._clock() - began_s
        if matcher.is_error():
            mask[:] = 0
        return mask


class GuideFactory:
    """One per engine. Its thread starts with its first work; `on_ready` is called there for each guide that has
    become ready. The vocabulary is read from the model's own files."""

    def __init__(self, model: Path, vocab_size: int) -> None:
        self.on_ready: Callable[[], None] = lambda: None
        self._model = model
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, "guides")
        self._vocabulary: Future[LLTokenizer] | None = None

    def prepare(self) -> None:
        """Read the vocabulary now: it takes up to a second in which no other thread runs. A vocabulary that cannot
        be used is an error of the guides, not of the engine."""
        self._start().exception()

    def guide(self, grammar: str) -> Guide | None:
        """None for the empty grammar. Returns at once."""
        if not grammar:
            return None
        vocabulary = self._start()
        compiled = self._thread.submit(lambda: _compile(vocabulary.result(), grammar))
        compiled.add_done_callback(lambda _: self.on_ready())
        return Guide(compiled)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _start(self) -> Future[LLTokenizer]:
        if self._vocabulary is None:
            usual = threading.stack_size(COMPILE_STACK_BYTES)
            try:
                self._vocabulary = self._thread.submit(self._read_vocabulary)
            finally:
                threading.stack_size(usual)
        return self._vocabulary

    def _read_vocabulary(self) -> LLTokenizer:
        return build_tokenizer(load_tokenizer_files(self._model), self._vocab_size)


def _compile(vocabulary: LLTokenizer, grammar: str) -> Compiled:
    return Compiled(compile_grammar(vocabulary, grammar), new_mask(vocabulary.vocab_size))
