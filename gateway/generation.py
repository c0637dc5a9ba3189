"""What the gateway's front asks of its core, and what comes back. Knows nothing of HTTP, gRPC or text."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from core.ids import BlockHash, RequestId, new_request_id
from core.sampling import SamplingParams, Top
from core.scores import PromptScore


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One validated, tokenised choice. `chain` holds the hashes of the prompt's full blocks; `deadline_s` is what
    the client allows in all; `client_request_id` is for abort and logs, never a key. With a `leader`, a choice of the
    same prompt, it starts when that one's blocks are where it decodes (or when it has ended). `arrived_s` is when it
    came, on the event loop's clock (None: it does now); `trace_parent` names its span, if it is traced. It belongs to
    `tenant` ("": nobody has a key); `cache_salt` is what `chain` was hashed with and workers hash with."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    chain: tuple[BlockHash, ...] = ()
    deadline_s: float = 600.0
    client_request_id: str = ""
    leader: "GenerationRequest | None" = None
    arrived_s: float | None = None
    trace_parent: str = ""
    tenant: str = ""
    cache_salt: bytes = b""
    request_id: RequestId = field(default_factory=new_request_id)

    @property
    def is_scored(self) -> bool:
        """Its prompt's tokens are to be scored, and for that computed, cached or not."""
        return self.params.num_prompt_logprobs >= 0

    def lacks_scores(self, scores: Sequence[PromptScore]) -> bool:
        """Whether the prompt's tokens are to be scored and these are not all: the first has none."""
        return self.is_scored and len(scores) < len(self.prompt_ids) - 1


@dataclass(frozen=True, slots=True)
class OutputToken:
    """One token of one choice, accepted in order. `finish_reason` is empty but on the choice's last token; `top` are
    the likeliest tokens in its place, if the request asks for some."""

    choice: int
    position: int
    token_id: int
    logprob: float
    finish_reason: str
    top: Top = ()
