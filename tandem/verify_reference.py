"""transformers as a second opinion: its greedy choice in float32 at every position of outputs that we made."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from core.model_path import resolve_model
from tandem.verify import Verdict
from tandem.verify_prompts import Case

ROUNDING_GAP = 1e-3


def compare_with_transformers(model: str, cases: Sequence[Case], expected: Sequence[list[int]]) -> Verdict:
    """One forward over prompt and output: as long as outputs agree so far, its argmax is its greedy choice. Positions
    whose two best logits are closer than ROUNDING_GAP count as agreeing. Only greedy cases are compared."""
    reference = load_reference(resolve_model(model))
    greedy = [(case, output) for case, output in zip(cases, expected, strict=True) if case.params.is_greedy]
    differing = []
    for case, output in greedy:
        at = _first_disagreement(reference, case, output)
        if at is not None:
            differing.append(f"{case.name}: position {at}")
    return Verdict("transformers", len(greedy), sum(len(output) for _, output in greedy), tuple(differing))


def load_reference(path: Path) -> Any:
    """The model in float32, from the same file, dequantised."""
    from transformers import AutoModelForCausalLM, GgufConfig

    if path.is_dir():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    dense = GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=dense, dtype=torch.float32
    )


def _first_disagreement(reference: Any, case: Case, output: Sequence[int]) -> int | None:
    ids = torch.tensor([[*case.prompt_ids, *output[:-1]]])
    with torch.inference_mode():
        logits = reference(ids).logits[0, len(case.prompt_ids) - 1 :]
    best = logits.topk(2)
    gaps = best.values[:, 0] - best.values[:, 1]
    wrong = (best.indices[:, 0] != torch.tensor(output)) & (gaps > ROUNDING_GAP)
    return int(wrong.nonzero()[0]) if bool(wrong.any()) else None
