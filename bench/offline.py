"""An engine in this process whose tokens are timed: what `latency` and `throughput` measure. Knows no servers."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from core.errors import InvalidRequest
from core.ids import HandoffId
from core.kv_spec import DType
from engine.config import EngineConfig, WeightForm
from engine.llm import LLM
from engine.scheduler import Progress, Sampled
from engine.sequence import FinishReason


@dataclass(frozen=True, slots=True)
class Engine:
    """Which one. Raises ValueError naming the option that is wrong."""

    model: str = "smollm2"
    dtype: DType = DType.BFLOAT16
    weights: WeightForm = WeightForm.STORED
    threads: int = 1

    def __post_init__(self) -> None:
        check_positive(threads=self.threads)

    def config(self) -> EngineConfig:
        return EngineConfig(self.model, self.dtype, weights=self.weights, num_threads=self.threads)


class TimedLLM(LLM):
    """Notes the moment of each token, by the request's number in the order given. A step's tokens share theirs."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._moments: dict[str, list[float]] = {}

    def take_moments(self) -> list[list[float]]:
        """Those of the last `generate`, a list for each prompt, in order; then they are forgotten."""
        moments, self._moments = self._moments, {}
        return [moments[number] for number in sorted(moments, key=int)]

    def _take(
        self,
        progress: Progress,
        drawn: dict[HandoffId, list[Sampled]],
        reasons: dict[HandoffId, FinishReason],
    ) -> None:
        super()._take(progress, drawn, reasons)
        sequence, token, _ = progress
        if token is not None:
            self._moments.setdefault(sequence.id.request_id, []).append(time.perf_counter())


@contextlib.contextmanager
def opened(engine: Engine, **changes: object) -> Iterator[TimedLLM]:
    """The engine with `changes` to its configuration. Raises ModelLoadError, and ValueError for a configuration that
    is none or a request that can never run."""
    torch.set_num_threads(engine.threads)  # the native pass has as many
    llm = TimedLLM(replace(engine.config(), **changes))  # type: ignore[arg-type]
    try:
        yield llm
    except InvalidRequest as error:
        raise ValueError(f"{error.field}: {error}") from error
    finally:
        llm.close()


def check_positive(**options: float) -> None:
    """Raises ValueError naming the first option that is not."""
    for name, value in options.items():
        if value <= 0:
            raise ValueError(f"--{name.replace('_', '-')} must be positive, got {value}")
