"""What a gateway is told at its start. Read once, passed down."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """`model` is a directory, a GGUF file or `smollm2`; `model_id` is what clients write (derived from `model` unless
    given). `http` and `grpc` are host:port, port 0 picks a free one. A client that takes nothing of its stream for
    `stall_limit_s` loses it; a request that would wait for longer than `max_queue_s` is refused at once. Prompts of
    which a decode worker lacks at most `max_local_tokens` are computed there; `routing` is by cached prefixes and
    load, or `round_robin`. Moving a prefix between workers takes `pull_cost_s` beyond its bytes: it is computed again
    where that takes less. Spans go to `otlp`, if anywhere. With `api_keys`, a file of tenants and their keys
    (gateway.tenants), clients need one."""

    model: str = "smollm2"
    model_id: str | None = None
    http: str = "127.0.0.1:8000"
    grpc: str = "127.0.0.1:50051"
    redis_url: str = "redis://127.0.0.1:6379/0"
    cluster: str = "default"
    ready_file: str | None = None
    max_body_bytes: int = 8 << 20
    request_timeout_s: float = 600.0
    stall_limit_s: float = 60.0
    max_queue_s: float = 10.0
    otlp: str | None = None
    max_local_tokens: int = 0
    routing: str = "prefix"
    pull_cost_s: float = 0.003
    api_keys: str | None = None

    def __post_init__(self) -> None:
        if self.max_local_tokens < 0:
            raise ValueError(f"max_local_tokens must not be negative, got {self.max_local_tokens}")
        if self.pull_cost_s < 0:
            raise ValueError(f"pull_cost_s must not be negative, got {self.pull_cost_s}")
