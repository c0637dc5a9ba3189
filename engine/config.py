"""What an engine is told at its start. Read once, passed down, never changed."""

from dataclasses import dataclass, field
from enum import StrEnum

from core.block_hash import HASH_BLOCK_TOKENS
from core.kv_spec import DType
from core.logs import LogForm

MAX_LOCAL_TOKENS = 1024


class WeightForm(StrEnum):
    """STORED: a GGUF file's 4- and 8-bit matrices stay so, where the machine has products for them and the model runs
    in bfloat16. DENSE: every weight in the model's dtype."""

    STORED = "stored"
    DENSE = "dense"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`device` is where the model and its pool are, as torch names it. `token_budget` bounds the tokens of one step,
    `max_batch` the sequences; the pool has `num_blocks` blocks, or as many as `kv_bytes` hold. `borrowed_cores` are
    others': used while nobody wants them. A decode worker computes a prompt itself, in chunks between the tokens of
    others, if it lacks at most `max_local_tokens` of it. Its steps start `pace_s` apart at least while others use the
    time between: faster than its readers need is slower for those who wait for a prompt."""

    model: str = "smollm2"
    dtype: DType = DType.BFLOAT16
    device: str = "cpu"
    block_size: int = 16
    num_blocks: int | None = None
    kv_bytes: int = 1 << 30
    token_budget: int = 512
    max_batch: int = 64
    max_context_len: int | None = None
    enable_prefix_cache: bool = True
    num_threads: int = 1
    borrowed_cores: tuple[int, ...] = ()
    weights: WeightForm = WeightForm.STORED
    log: LogForm = field(default_factory=LogForm)
    max_local_tokens: int = MAX_LOCAL_TOKENS
    pace_s: float = 0.0

    def __post_init__(self) -> None:
        if self.block_size <= 0 or self.block_size % HASH_BLOCK_TOKENS:
            raise ValueError(f"block_size must be a multiple of {HASH_BLOCK_TOKENS}, got {self.block_size}")
        for name in ("kv_bytes", "token_budget", "max_batch", "num_threads"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("max_local_tokens", "pace_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.num_blocks is not None and self.num_blocks <= 0:
            raise ValueError(f"num_blocks must be positive, got {self.num_blocks}")

    def pool_blocks(self, block_bytes: int) -> int:
        return self.num_blocks if self.num_blocks is not None else max(1, self.kv_bytes // block_bytes)
