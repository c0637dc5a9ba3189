"""What decides the next token. The same parameters, tokens, seed and position give the same token anywhere."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """temperature 0 is greedy (then top_p, top_k and seed have no effect); top_p in (0, 1]; top_k 0 means no
    limit; seed is an unsigned 64-bit number; stop_token_ids end the output with finish reason `stop` and are
    part of it as ids but not as text (the model's end-of-sequence ids are added unless ignore_eos)."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def choice_seed(self, choice: int) -> int:
        """A choice's seed is a function of (seed, index): the golden-ratio step keeps choices apart."""
        return (self.seed + choice * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
