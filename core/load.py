"""A worker's load as it travels: from the engine to its service, to gateways and to Redis."""

from dataclasses import dataclass, field

STEP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Sent:
    """What a worker's transfers over one connector have carried, without framing, and how long they took while they
    had something to send. Those that failed count with what they sent."""

    connector: str
    num_transfers: int
    num_bytes: int
    seconds: float


@dataclass(slots=True)
class DiskCounts:
    """What a worker's disk cache holds, and blocks that it has read, written, given up for others, or found damaged
    since the worker's start, and the disk's errors. Its store counts in it; others have copies."""

    num_blocks: int = 0
    num_bytes: int = 0
    num_read: int = 0
    num_written: int = 0
    num_evicted: int = 0
    num_bad: int = 0
    num_errors: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """What a worker has done since its start: nothing here ever shrinks, but for what its disk holds. `steps_by_time`
    and `steps_by_batch` count its steps by STEP_BOUNDS_S and BATCH_BOUNDS, each up to its bound, the last beyond all;
    `steps_s` and `num_batched` are the sums of their durations and sequences. Tokens are those whose KV was computed:
    of prompts, of outputs, and again after a preemption."""

    steps_by_time: tuple[int, ...] = ()
    steps_s: float = 0.0
    steps_by_batch: tuple[int, ...] = ()
    num_batched: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0
    sent: tuple[Sent, ...] = ()
    disk: DiskCounts | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """`num_free_blocks` counts blocks free or cached without a reference: what a new request can get.
    `num_suspended` of those that run or wait have readers that take nothing: others get their places and blocks.
    `tokens_per_s` is what it computed lately while it did compute; 0 when that is unknown. `blocks_by_state` sums
    to `num_blocks`. `sequence` grows with each publication of one epoch. A worker that `is_draining` finishes what it
    has and wants nothing new."""

    num_blocks: int = 0
    num_free_blocks: int = 0
    num_queued_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    step_s: float = 0.0
    tokens_per_s: float = 0.0
    blocks_by_state: dict[str, int] = field(default_factory=dict)
    sequence: int = 0
    is_draining: bool = False
    num_suspended: int = 0
    counts: Counts = field(default_factory=Counts)
