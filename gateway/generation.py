"""What the gateway's front asks of its core, and what comes back. Knows nothing of HTTP, gRPC or text."""

from dataclasses import dataclass, field

from core.ids import BlockHash, RequestId, new_request_id
from core.sampling import SamplingParams, Top


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A validated, tokenised request. `chain` holds the hashes of the prompt's full blocks; `deadline_s` is what the
    client allows in all; `client_request_id` is for abort and logs, never a key."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    chain: tuple[BlockHash, ...] = ()
    deadline_s: float = 600.0
    client_request_id: str = ""
    request_id: RequestId = field(default_factory=new_request_id)


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
