"""What `tandem serve` will run, decided before anything starts: processes, their cores and threads. No I/O."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from core.worker import Role

ANY_PROMPT = 1 << 30


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What the command line asks for. With `num_colocated` engines there are no tiers. Raises ValueError for counts
    that make no system."""

    model: str
    model_id: str | None
    num_prefill: int | None
    num_decode: int | None
    num_colocated: int
    connector: str
    http: str
    grpc: str
    redis_url: str
    device: str
    dtype: str
    weights: str
    num_blocks: int | None
    block_size: int
    max_batch: int
    token_budget: int
    max_queue_s: float
    max_local_tokens: int
    pace: float
    can_borrow: bool
    routing: str = "prefix"
    pull_cost_s: float = 0.003
    has_prefix_cache: bool = True
    disk_cache: str | None = None
    disk_cache_bytes: int = 8 << 30
    log_format: str = "text"
    otlp: str | None = None
    api_keys: str | None = None

    def __post_init__(self) -> None:
        counts = (self.num_prefill, self.num_decode)
        if self.num_colocated and counts != (None, None):
            raise ValueError("--colocated is instead of --prefill and --decode")
        if self.num_colocated < 0 or any(count is not None and count < 1 for count in counts):
            raise ValueError("--prefill, --decode and --colocated count workers, from 1 on")

    @property
    def workers(self) -> list[tuple[str, Role]]:
        """Names and roles."""
        if self.num_colocated:
            return [(f"colocated-{index}", Role.DECODE) for index in range(self.num_colocated)]
        counts = {Role.PREFILL: self.num_prefill, Role.DECODE: self.num_decode}
        return [
            (f"{role.value}-{i}", role) for role, n in counts.items() for i in range(1 if n is None else n)
        ]


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """One process: a name for the log, what to execute, the cores it may use and its threads."""

    name: str
    command: tuple[str, ...]
    cores: tuple[int, ...]
    num_threads: int


def split_cores(cores: Sequence[int], num_workers: int) -> list[tuple[int, ...]]:
    """An equal share of the cores to each worker, in order; with fewer cores than workers they take turns."""
    if len(cores) < num_workers:
        return [(cores[index % len(cores)],) for index in range(num_workers)]
    bounds = [index * len(cores) // num_workers for index in range(num_workers + 1)]
    return [tuple(cores[start:end]) for start, end in pairwise(bounds)]


def plan_workers(plan: ServePlan, cores: Sequence[int]) -> list[ChildPlan]:
    """Equal shares: the prefill tier's follows its share of the workers. Each may borrow the cores of the others."""
    workers = plan.workers
    children = []
    for (name, role), share in zip(workers, split_cores(cores, len(workers)), strict=True):
        borrowed = [core for core in cores if core not in share] if plan.can_borrow else []
        command = _worker_command(plan, role, name, len(share), borrowed)
        children.append(ChildPlan(name, command, share, len(share)))
    return children


def plan_gateway(plan: ServePlan, ready_file: str, cores: Sequence[int]) -> ChildPlan:
    command = (*_tandem("gateway"), "--model", plan.model, "--http", plan.http, "--grpc", plan.grpc)
    command += ("--redis-url", plan.redis_url, "--ready-file", ready_file)
    command += ("--max-queue", str(plan.max_queue_s), "--max-local-tokens", str(plan.max_local_tokens))
    command += ("--routing", plan.routing, "--pull-cost", str(plan.pull_cost_s), *_observing(plan))
    command += ("--api-keys", plan.api_keys) if plan.api_keys is not None else ()
    command += ("--model-id", plan.model_id) if plan.model_id else ()
    return ChildPlan("gateway", command, tuple(cores), 1)


def _worker_command(
    plan: ServePlan, role: Role, name: str, num_threads: int, borrowed: Sequence[int]
) -> tuple[str, ...]:
    command = (*_tandem(role.value), "--model", plan.model, "--id", name, "--connector", plan.connector)
    command += (
        "--redis-url",
        plan.redis_url,
        "--device",
        plan.device,
        "--dtype",
        plan.dtype,
        "--weights",
        plan.weights,
        "--threads",
        str(num_threads),
    )
    command += ("--block-size", str(plan.block_size), "--max-batch", str(plan.max_batch))
    command += ("--token-budget", str(plan.token_budget), *_observing(plan))
    command += ("--borrow", ",".join(map(str, borrowed))) if borrowed else ()
    command += ("--max-local-tokens", str(ANY_PROMPT)) if plan.num_colocated else ()
    command += ("--pace", str(plan.pace)) if role is Role.DECODE and plan.pace else ()
    command += () if plan.has_prefix_cache else ("--no-prefix-cache",)
    if plan.disk_cache is not None and role is Role.PREFILL:
        command += ("--disk-cache", str(Path(plan.disk_cache) / name))
        command += ("--disk-cache-bytes", str(plan.disk_cache_bytes))
    command += ("--num-blocks", str(plan.num_blocks)) if plan.num_blocks else ()
    command += ("--model-id", plan.model_id) if plan.model_id else ()
    return command


def _observing(plan: ServePlan) -> tuple[str, ...]:
    return ("--log-format", plan.log_format, *(("--otlp", plan.otlp) if plan.otlp else ()))


def _tandem(command: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "tandem.cli", command)
