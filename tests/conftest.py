"""What tests share: a tiny random model, and one process that answers what the tandem must answer."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from core.sampling import SamplingParams
    from engine.llm import Completion

# A busy machine is no fault: neither an example's time nor that of making it is judged. Examples are the same each
# time; `--hypothesis-profile=explore` looks at others.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("patient", **PATIENT, derandomize=True)  # type: ignore[arg-type]
settings.register_profile("explore", **PATIENT)  # type: ignore[arg-type]
settings.load_profile("patient")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

Oracle = Callable[..., list[int]]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a two-layer Llama of random weights and a byte-level tokenizer."""
    from engine.testing import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def one_process(tiny_model: Path) -> Iterator[Callable[[Sequence[int], "SamplingParams"], "Completion"]]:
    """What the same engine makes of a prompt in one process: batch of one, cache off, float32."""
    import torch

    from core.kv_spec import DType
    from engine.config import EngineConfig
    from engine.llm import LLM

    torch.set_num_threads(1)  # two threads on busy cores wait for each other
    llm = LLM(EngineConfig(str(tiny_model), DType.FLOAT32, num_blocks=256, enable_prefix_cache=False))
    yield lambda prompt_ids, params: llm.generate([prompt_ids], params)[0]
    llm.close()


@pytest.fixture(scope="session")
def oracle(one_process: Callable[[Sequence[int], "SamplingParams"], "Completion"]) -> Oracle:
    """`oracle(prompt_ids, max_tokens=8, ...)`: the tokens of one process."""
    from core.sampling import SamplingParams

    def generate(prompt_ids: Sequence[int], **params: object) -> list[int]:
        sampling = SamplingParams(**{"max_tokens": 16, "temperature": 0.0, **params})  # type: ignore[arg-type]
        return one_process(prompt_ids, sampling).token_ids

    return generate
