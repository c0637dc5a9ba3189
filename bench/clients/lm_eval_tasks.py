"""lm-eval's tasks over a tandem's completions, and over the same weights in transformers: the numbers must be equal.
Runs lm-eval as a command in its own environment."""

import json
import math
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from bench.clients.cases import Outcome
from core.errors import Unavailable

TASKS = Path(__file__).resolve().parents[2] / "tests/bench/lm_eval"
NAMES = ("tandem_choice", "tandem_last_word", "tandem_text", "tandem_go_on")
TOLERANCE = 2e-3
"""Of a sum of log-probabilities in float32: two ways to add up the same products."""
LIMIT_S = 900.0

Scores = dict[str, float]
Samples = list[Any]


def compare(python: Path, url: str, model: str, weights: Path) -> list[Outcome]:
    """An outcome for each task. `weights`: a directory with what the tandem serves, dense, and its tokenizer. Raises
    Unavailable when lm-eval itself fails."""
    address = f"model={model},base_url={url}/v1/completions,tokenizer={weights}"
    options = "tokenizer_backend=huggingface,tokenized_requests=True,num_concurrent=4,max_retries=1"
    ours = evaluate(python, "local-completions", f"{address},{options}")
    theirs = evaluate(python, "hf", f"pretrained={weights},dtype=float32")
    return [compared(name, ours[name], theirs[name]) for name in NAMES]


def evaluate(python: Path, backend: str, arguments: str) -> dict[str, tuple[Scores, Samples]]:
    """By task: its metrics, and what each of its requests was answered."""
    with tempfile.TemporaryDirectory(prefix="tandem-lm-eval-") as directory:
        command = [str(python), "-m", "lm_eval", "--model", backend, "--model_args", arguments]
        command += ["--tasks", ",".join(NAMES), "--include_path", ".", "--batch_size", "1", "--device", "cpu"]
        command += ["--output_path", directory, "--log_samples"]
        offline = {
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "OPENAI_API_KEY": "none",
            "PYTHONPATH": "",
        }
        done = subprocess.run(
            command,
            cwd=TASKS,
            env={**os.environ, **offline, "HF_DATASETS_CACHE": f"{directory}/cache"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        if done.returncode:
            raise Unavailable(f"lm-eval with {backend} exited with {done.returncode}: {done.stderr[-1500:]}")
        return {name: _read(Path(directory), name) for name in NAMES}


def _read(directory: Path, name: str) -> tuple[Scores, Samples]:
    (results,) = directory.rglob("results_*.json")
    (samples,) = directory.rglob(f"samples_{name}_*.jsonl")
    told = json.loads(results.read_text(encoding="utf-8"))["results"][name]
    scores = {key.partition(",")[0]: value for key, value in told.items() if isinstance(value, float)}
    lines = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    by_doc = sorted(lines, key=lambda line: int(line["doc_id"]))
    return scores, [line["filtered_resps"] for line in by_doc]


def compared(name: str, ours: tuple[Scores, Samples], theirs: tuple[Scores, Samples]) -> Outcome:
    """Metrics, and every answer: a text is the same, a log-probability within TOLERANCE, greedy or not the same."""
    scores = {key: value for key, value in ours[0].items() if "stderr" not in key}
    wrong = [
        key for key, value in scores.items() if not math.isclose(value, theirs[0][key], rel_tol=TOLERANCE)
    ]
    farthest = _distance(ours[1], theirs[1])
    told = ", ".join(f"{key} {value:.5g} and {theirs[0][key]:.5g}" for key, value in scores.items())
    is_right = bool(scores) and not wrong and farthest <= TOLERANCE
    return Outcome(name, is_right, f"{told}; {len(ours[1])} answers at most {farthest:.1g} apart")


def _distance(ours: Any, theirs: Any) -> float:
    """The largest difference of two numbers in the same place; infinite where anything else differs."""
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return max(map(_distance, ours, theirs), default=0.0)
    try:
        return abs(float(ours) - float(theirs))
    except (TypeError, ValueError):
        return 0.0 if ours == theirs else math.inf
