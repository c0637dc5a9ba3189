"""A worker's load as it travels: from the engine to its service, to gateways and to Redis."""

from dataclasses import dataclass, field


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
