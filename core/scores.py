"""What a model says of the tokens of a prompt."""

from dataclasses import dataclass

from core.sampling import Top


@dataclass(frozen=True, slots=True)
class PromptScore:
    """One token of a prompt, given those before it: its log-probability, its rank among all tokens (the likeliest is
    1), and the likeliest ones."""

    logprob: float
    rank: int
    top: Top = ()
