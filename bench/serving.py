"""`tandem serve` as a child, for benchmarks that talk to it as any client does."""

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

START_TIMEOUT_S = 120.0


@contextlib.asynccontextmanager
async def served(arguments: Sequence[str]) -> AsyncIterator[str]:
    """The HTTP address of a tandem of its own on free ports."""
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as directory:
        ready, log = Path(directory) / "ready.json", Path(directory) / "log"
        command = [sys.executable, "-m", "tandem.cli", "serve", *arguments, "--ready-file", str(ready)]
        command += ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not ready.exists():
                    if process.returncode is not None:
                        raise RuntimeError(log.read_text())
                    await asyncio.sleep(0.1)
            yield json.loads(ready.read_text())["http"]
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()
