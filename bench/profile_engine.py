"""One engine's step costs, measured on the cores that this process may use: a child of `bench.profile`.

python -m bench.profile_engine '{"config": {...}, "borrow": [1]}' writes StepCosts as JSON; with "hog" it computes
prompts until it is ended: a neighbour that is busy."""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import count
from typing import Any

import msgspec
import torch

from bench.simulation.costs import StepCosts
from core.ids import HandoffId, RequestId
from core.sampling import SamplingParams
from engine.config import EngineConfig
from engine.llm import LLM
from engine.sequence import Sequence
from kernels.cpu.crew import start_crew

CHUNKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
BATCHES = (1, 2, 4, 8, 16, 32)
SHORT, LONG = 16, 2048
KEYS_CHUNK, KEYS_BATCH = 128, 4
WARM_UP, REPEATS = 1, 7
_numbers = count()


class Bench:
    """An engine whose steps are composed by hand, over whatever KV its pool holds."""

    def __init__(self, config: EngineConfig) -> None:
        self._llm = LLM(
            replace(config, enable_prefix_cache=False, max_batch=max(BATCHES), token_budget=max(CHUNKS))
        )
        self._scheduler = self._llm.engine.scheduler

    def chunk_s(self, num_tokens: int, context: int) -> float:
        """A step of the next `num_tokens` of a prompt of which `context` are there; nothing is sampled."""
        scheduler = self._scheduler

        def step() -> float:
            sequence = self._sequence(context, context + num_tokens + 1, SamplingParams(max_tokens=4))
            scheduler.limits = replace(scheduler.limits, token_budget=num_tokens)
            took_s = self._step_s()
            scheduler.finish(sequence)
            return took_s

        return self._median_s(step)

    def decode_s(self, batch: int, context: int) -> float:
        """A step that makes a token of each of `batch` sequences."""
        scheduler = self._scheduler
        scheduler.limits = replace(scheduler.limits, token_budget=max(CHUNKS))
        params = SamplingParams(max_tokens=1 << 20, temperature=0.0)
        sequences = [self._sequence(context - 1, context, params) for _ in range(batch)]
        took_s = self._median_s(self._step_s)
        for sequence in sequences:
            scheduler.finish(sequence)
        return took_s

    def _sequence(self, num_computed: int, num_tokens: int, params: SamplingParams) -> Sequence:
        scheduler = self._scheduler
        tokens = [100 + place % 100 for place in range(num_tokens)]
        sequence = Sequence(HandoffId(RequestId(str(next(_numbers))), 1), tokens, num_tokens, params, "bench")
        blocks = scheduler.pool.allocate(scheduler.num_blocks_for(num_tokens + REPEATS + WARM_UP))
        assert blocks is not None, "the pool is too small"
        sequence.block_ids, sequence.num_computed = list(blocks), num_computed
        scheduler.resume(sequence)
        return sequence

    def _step_s(self) -> float:
        began_s = time.perf_counter()
        self._llm.engine.step()
        return time.perf_counter() - began_s

    def _median_s(self, step: Callable[[], float]) -> float:
        return statistics.median([step() for _ in range(WARM_UP + REPEATS)][WARM_UP:])

    def costs(self) -> StepCosts:
        few, many = self.decode_s(KEYS_BATCH, SHORT), self.decode_s(KEYS_BATCH, LONG)
        decode_key_s = max(0.0, (many - few) / (KEYS_BATCH * (LONG - SHORT)))
        near, far = self.chunk_s(KEYS_CHUNK, 0), self.chunk_s(KEYS_CHUNK, LONG)
        prefill_key_s = max(0.0, (far - near) / (KEYS_CHUNK * LONG))
        body = [(size, self.chunk_s(size, 0) - prefill_key_s * size * (size + 1) / 2) for size in CHUNKS]
        by_size = dict(body)
        head = [
            (batch, max(0.0, self.decode_s(batch, SHORT) - by_size[batch] - batch * SHORT * decode_key_s))
            for batch in BATCHES
        ]
        return StepCosts(tuple(body), tuple(head), prefill_key_s, decode_key_s)

    def compute_prompts(self) -> None:
        """For ever."""
        while True:
            self.chunk_s(256, 0)


def main() -> int:
    told: dict[str, Any] = json.loads(sys.argv[1])
    config = msgspec.convert(told["config"], EngineConfig)
    torch.set_num_threads(config.num_threads)
    start_crew(config.num_threads, told.get("borrow", ()))
    bench = Bench(config)
    if told.get("hog"):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        bench.compute_prompts()
    sys.stdout.write(json.dumps(asdict(bench.costs())) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
