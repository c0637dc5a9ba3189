"""What passes between a worker's service process and its engine process: one message each way per step.

Commands go down, events come up, both as msgpack lists of tagged structs. No pickle, no torch, no sockets.
"""

import msgspec

from core.grant import FirstToken
from core.ids import BlockHash, BlockId, HandoffId
from core.load import Load
from core.sampling import SamplingParams, Top
from core.scores import PromptScore


class Command(msgspec.Struct, frozen=True, tag=True):
    id: HandoffId


class StartPrompt(Command, frozen=True, tag=True):
    """Prefill: compute `prompt_ids` and what was already generated, then sample one token. With `takes_over`, an
    earlier attempt of the request whose blocks are still held goes on under the new id instead. `cache_salt` (at most
    MAX_SALT_BYTES) is what its blocks are hashed with."""

    prompt_ids: list[int]
    output_ids: list[int]
    params: SamplingParams
    takes_over: int = 0
    cache_salt: bytes = b""


class Granted(Command, frozen=True, tag=True):
    """Prefill: a decode worker has reserved blocks for it: it no longer counts against the bound on prompts that wait
    for a grant."""


class Release(Command, frozen=True, tag=True):
    """Prefill: the lease on the prompt's blocks ends."""


class Reserve(Command, frozen=True, tag=True):
    """Decode: hold blocks and a batch place. Waits at most `wait_s` for room. When `is_local`, compute the prompt
    here instead: tokens follow from the first one on. `cache_salt` (at most MAX_SALT_BYTES) is what its blocks are
    hashed with."""

    prompt_ids: list[int]
    output_ids: list[int]
    params: SamplingParams
    wait_s: float
    credit: int
    is_local: bool = False
    cache_salt: bytes = b""


class Activate(Command, frozen=True, tag=True):
    """Decode: the seal was verified; decode from the token after `first_tokens`."""

    first_tokens: list[FirstToken]


class Credit(Command, frozen=True, tag=True):
    """Decode: the reader takes `num_tokens` more."""

    num_tokens: int


class AbortWork(Command, frozen=True, tag=True):
    """Both: end it at any stage. When `is_quiet` is False a writer may still touch its blocks: quarantine them."""

    is_quiet: bool = True


class Quiet(Command, frozen=True, tag=True):
    """Decode: nothing writes into the handoff's quarantined blocks any more."""


class ClearCache(msgspec.Struct, frozen=True, tag=True):
    """Both: forget every cached block; what runs keeps its own."""


class FetchBlocks(Command, frozen=True, tag=True):
    """Both: have room for those blocks of a chain that follow the cached ones, for somebody to write."""

    hashes: list[BlockHash]


class Fetched(Command, frozen=True, tag=True):
    """Both: nobody writes into the fetch's blocks any more. When they are whole, they are cached from now on."""

    is_whole: bool


class LendBlocks(Command, frozen=True, tag=True):
    """Both: keep what is cached of these blocks, for somebody to read."""

    hashes: list[BlockHash]


class EndLoan(Command, frozen=True, tag=True):
    """Both: nobody reads the lent blocks any more."""


AnyCommand = (
    StartPrompt
    | Granted
    | Release
    | Reserve
    | Activate
    | Credit
    | AbortWork
    | Quiet
    | ClearCache
    | FetchBlocks
    | Fetched
    | LendBlocks
    | EndLoan
)


class Event(msgspec.Struct, frozen=True, tag=True):
    id: HandoffId


class Started(Event, frozen=True, tag=True):
    """Prefill: every block of the `num_tokens` to be handed over is reserved; `block_ids` in prompt order."""

    block_ids: list[BlockId]
    num_cached_tokens: int
    num_tokens: int


class Computed(Event, frozen=True, tag=True):
    """Prefill: the KV of the first `num_tokens` tokens is written and will not change."""

    num_tokens: int


class First(Event, frozen=True, tag=True):
    """Prefill: the first tokens; `finish_reason` is empty unless a choice ended with it."""

    first_tokens: list[FirstToken]
    finish_reasons: list[str]
    chain_hash: BlockHash


class Reserved(Event, frozen=True, tag=True):
    """Decode: `block_ids` are to be written, after the `num_cached_tokens` that are already there."""

    block_ids: list[BlockId]
    num_tokens: int
    num_cached_tokens: int
    chain_hash: BlockHash


class Token(Event, frozen=True, tag=True):
    """Decode: one token of one choice, with the likeliest ones in its place if the request asks for them. For a
    prompt that was computed here `num_cached_tokens` is what its cache had of it."""

    choice: int
    position: int
    token_id: int
    logprob: float
    finish_reason: str
    queue_s: float
    num_preemptions: int
    top: Top = ()
    num_cached_tokens: int = 0


class PromptScores(Event, frozen=True, tag=True):
    """Both: what the model says of the prompt's tokens from the one at `position` on; told before the first token."""

    position: int
    scores: list[PromptScore]


class WorkFailed(Event, frozen=True, tag=True):
    """Both: it ended with an error on this engine; its blocks are back (or quarantined). `field` names the client's
    parameter at fault, if one is."""

    code: str
    message: str
    field: str = ""


class WorkAborted(Event, frozen=True, tag=True):
    """Both: the answer to AbortWork, also when nothing of that id was known."""


class Fetching(Event, frozen=True, tag=True):
    """Both: the chain's first `num_cached` blocks are cached and kept; `block_ids` are for those that follow, as many
    as there was room for."""

    num_cached: int
    block_ids: list[BlockId]


class Lent(Event, frozen=True, tag=True):
    """Both: of the blocks asked for those that are here, each with its hash, in the order asked."""

    hashes: list[BlockHash]
    block_ids: list[BlockId]


AnyEvent = (
    Started | Computed | First | Reserved | Token | PromptScores | WorkFailed | WorkAborted | Fetching | Lent
)


class Commands(msgspec.Struct, frozen=True, tag=True):
    """One message down."""

    commands: list[AnyCommand]


class Report(msgspec.Struct, frozen=True, tag=True):
    """One message up: the events of one step, the load after it, and the prefix cache's changes as (stored, hash).
    `failure` is set on an engine's last report, when it cannot go on."""

    events: list[AnyEvent]
    load: Load | None = None
    cache_changes: list[tuple[bool, BlockHash]] = []
    failure: str = ""


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Sent while weights load; the first Report follows when the engine is ready."""

    done_bytes: int
    total_bytes: int


Upward = Report | Loading
