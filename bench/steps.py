"""An engine's whole step, taken apart while it runs: scheduling, the input, the pass, sampling, accounting."""

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from typing import cast

from torch import Tensor

from core.ids import HandoffId, RequestId
from core.sampling import SamplingParams
from engine.batch import ForwardBatch
from engine.engine import Engine
from engine.kv_pool import KVPool
from engine.llm import LLM
from engine.model import LlamaModel
from engine.runner import ModelRunner
from engine.scheduler import Sampled, Work
from engine.sequence import Sequence

WARM_UP = 3


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds, in the order of the step; the pass is the kernels' part."""

    schedule_s: float
    prepare_s: float
    forward_s: float
    sample_s: float
    commit_s: float

    @property
    def whole_s(self) -> float:
        return self.forward_s + self.outside_s

    @property
    def outside_s(self) -> float:
        return self.schedule_s + self.prepare_s + self.sample_s + self.commit_s


class TimedModel:
    """Stands in for a model where only `forward` is called, and keeps the moments of the latest one."""

    def __init__(self, model: LlamaModel) -> None:
        self._model = model
        self.began_s = self.ended_s = 0.0

    def forward(self, batch: ForwardBatch, pool: KVPool) -> Tensor:
        self.began_s = time.perf_counter()
        logits = self._model.forward(batch, pool)
        self.ended_s = time.perf_counter()
        return logits


class TimedRunner:
    """The engine's runner around such a model, and the moment when it was done."""

    def __init__(self, model: LlamaModel, pool: KVPool, block_size: int, device: str) -> None:
        self.forward = TimedModel(model)
        self.ended_s = 0.0
        self._inner = ModelRunner(cast(LlamaModel, self.forward), pool, block_size, device)

    def run(self, work: Seq[Work]) -> dict[HandoffId, Sampled]:
        sampled = self._inner.run(work)
        self.ended_s = time.perf_counter()
        return sampled


def measure(
    llm: LLM,
    model: LlamaModel,
    pool: KVPool,
    num_sequences: int,
    context: int,
    temperature: float,
    repeats: int,
) -> StepTimes:
    """The shortest of each part over several decode steps. Sequences start `context` long, over whatever KV the pool
    holds."""
    scheduler = llm.engine.scheduler
    runner = TimedRunner(model, pool, llm.config.block_size, llm.config.device)
    engine = Engine(scheduler, runner)
    params = SamplingParams(max_tokens=1 << 20, temperature=temperature)
    sequences = [_sequence(llm, index, context, params) for index in range(num_sequences)]
    steps = [_step(engine, runner) for _ in range(WARM_UP + repeats)][WARM_UP:]
    for sequence in sequences:
        scheduler.finish(sequence)
    return StepTimes(*(min(getattr(step, field.name) for step in steps) for field in fields(StepTimes)))


def _sequence(llm: LLM, index: int, context: int, params: SamplingParams) -> Sequence:
    """One that runs as after a sealed handoff: all but its last token are computed."""
    scheduler = llm.engine.scheduler
    tokens = [100 + (index + place) % 100 for place in range(context)]
    sequence = Sequence(HandoffId(RequestId(f"bench-{index}"), 1), tokens, context, params, "bench")
    blocks = scheduler.pool.allocate(scheduler.num_blocks_for(context))
    assert blocks is not None, "the pool is too small"
    sequence.block_ids, sequence.num_computed = list(blocks), context - 1
    scheduler.resume(sequence)
    return sequence


def _step(engine: Engine, runner: TimedRunner) -> StepTimes:
    scheduled_s = 0.0

    def note(work: list[Work]) -> None:
        nonlocal scheduled_s
        scheduled_s = time.perf_counter()

    engine.on_scheduled = note
    began_s = time.perf_counter()
    engine.step()
    ended_s = time.perf_counter()
    return StepTimes(
        scheduled_s - began_s,
        runner.forward.began_s - scheduled_s,
        runner.forward.ended_s - runner.forward.began_s,
        runner.ended_s - runner.forward.ended_s,
        ended_s - runner.ended_s,
    )
