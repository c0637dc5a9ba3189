"""What `tandem serve` will run, decided before anything starts: processes, their cores and threads. No I/O."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from core.worker import Role


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What the command line asks for."""

    model: str
    model_id: str | None
    num_prefill: int
    num_decode: int
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
    can_borrow: bool
    log_format: str = "text"
    otlp: str | None = None


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
    """The prefill tier's share of the cores follows its share of the workers. Each may borrow those of the others."""
    roles = [Role.PREFILL] * plan.num_prefill + [Role.DECODE] * plan.num_decode
    counts = dict.fromkeys(Role, 0)
    children = []
    for role, share in zip(roles, split_cores(cores, len(roles)), strict=True):
        name = f"{role.value}-{counts[role]}"
        counts[role] += 1
        borrowed = [core for core in cores if core not in share] if plan.can_borrow else []
        command = _worker_command(plan, role, name, len(share), borrowed)
        children.append(ChildPlan(name, command, share, len(share)))
    return children


def plan_gateway(plan: ServePlan, ready_file: str, cores: Sequence[int]) -> ChildPlan:
    command = (*_tandem("gateway"), "--model", plan.model, "--http", plan.http, "--grpc", plan.grpc)
    command += ("--redis-url", plan.redis_url, "--ready-file", ready_file)
    command += ("--max-queue", str(plan.max_queue_s), *_observing(plan))
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
    command += ("--num-blocks", str(plan.num_blocks)) if plan.num_blocks else ()
    command += ("--model-id", plan.model_id) if plan.model_id else ()
    return command


def _observing(plan: ServePlan) -> tuple[str, ...]:
    return ("--log-format", plan.log_format, *(("--otlp", plan.otlp) if plan.otlp else ()))


def _tandem(command: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "tandem.cli", command)
