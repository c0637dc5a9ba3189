"""What a front asks for on a client's behalf: types and ranges are right, what depends on the model is unchecked."""

from dataclasses import dataclass, field

from core.clock import loop_time
from core.sampling import SamplingParams
from gateway.text.chat import Chat
from gateway.text.grammar import OutputForm

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LEN = 256


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request came, on the event loop's clock (now, unless said otherwise), how long its client allows from
    then on, the client's span, in the form of the header traceparent, and the tenant whose key the client has ("":
    nobody has one)."""

    at_s: float = field(default_factory=loop_time)
    allowed_s: float | None = None
    trace_parent: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Exactly one of text, chat and ids. `field` is what the client called it, for errors."""

    field: str
    text: str | None = None
    chat: Chat | None = None
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How tokens become text. `stop` strings end it, and are part of it only with `includes_stop`; with `tells_calls`
    the tokens that surround calls of functions are part of it, special or not."""

    stop: tuple[str, ...] = ()
    includes_stop: bool = False
    skips_special_tokens: bool = True
    tells_calls: bool = False


PLAIN = TextOptions()


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `max_tokens` is a ceiling, cut to what fits the context and the pools; 0 scores the prompt only,
    None is the default. `sampling` has everything else that needs no model; its max_tokens, stop and bad-word ids,
    the grammar of `form` and, without `seed`, its seed are filled in later. Each prompt gets the best `n` of
    `best_of` choices. Of one tenant's requests only those with the same `cache_salt` share cached prefixes."""

    model: str
    prompts: tuple[Prompt, ...]
    max_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(1))
    seed: int | None = None
    ignores_eos: bool = False
    text: TextOptions = PLAIN
    bad_words: tuple[str, ...] = ()
    form: OutputForm | None = None
    n: int = 1
    best_of: int = 1
    wants_logprobs: bool = False
    echoes: bool = False
    client_request_id: str = ""
    cache_salt: str = ""

    @property
    def num_choices(self) -> int:
        """Outputs to generate in all."""
        return len(self.prompts) * max(self.n, self.best_of)
