"""What decides the next token. The same parameters, tokens, seed and position give the same token anywhere."""

from dataclasses import KW_ONLY, dataclass

MAX_LOGPROBS = 20
Top = tuple[tuple[int, float], ...]
"""The likeliest tokens in one place, the likeliest first: ids and log-probabilities."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """temperature 0 is greedy (then min_p, top_p, top_k and seed have no effect); top_p in (0, 1]; top_k 0 means no
    limit; min_p in [0, 1] keeps tokens of at least that share of the likeliest one's probability; seed is an unsigned
    64-bit number.

    stop_token_ids end the output with finish reason `stop` and are part of it as ids but not as text (the model's
    end-of-sequence ids are added unless ignore_eos); none of them is drawn before min_tokens are there.

    presence_penalty is taken once, and frequency_penalty for each time, from the logits of tokens that the output
    has; repetition_penalty divides (below 0: multiplies) those of tokens that prompt or output have. `logit_bias` is
    added. Nothing but `allowed_token_ids` is drawn, if there are any, and nothing that would complete one of
    `bad_words`. `grammar` is what the output must follow, in llguidance's form; empty: anything.

    num_logprobs asks, for each token, for the log-probabilities of that many likeliest ones: those of the model,
    before any of the above. num_prompt_logprobs asks the same of the prompt's tokens; -1 does not ask. `priority`:
    lower ones are admitted first."""

    max_tokens: int
    temperature: float = 1.0
    _: KW_ONLY
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: str = ""
    num_logprobs: int = 0
    num_prompt_logprobs: int = -1
    priority: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def changes_logits(self) -> bool:
        """Whether tokens are drawn from other logits than the model's."""
        needs_state = self.has_penalties or bool(self.bad_words or self.min_tokens or self.grammar)
        return needs_state or bool(self.logit_bias or self.allowed_token_ids or self.min_p)

    def choice_seed(self, choice: int) -> int:
        """A choice's seed is a function of (seed, index): the golden-ratio step keeps choices apart."""
        return (self.seed + choice * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
