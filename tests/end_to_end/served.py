"""`tandem serve` as tests run it."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

TIMEOUT_S = 60


@asynccontextmanager
async def serve(
    model: Path, directory: Path, *arguments: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict]]:
    ready, log = directory / "ready.json", directory / "log"
    command = [sys.executable, "-m", "tandem.cli", "serve", str(model), "--http", "127.0.0.1:0"]
    command += ["--grpc", "127.0.0.1:0", "--ready-file", str(ready), "--num-blocks", "128", *arguments]
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=sink, stderr=sink, start_new_session=True
        )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not ready.exists():
                assert process.returncode is None, log.read_text()
                await asyncio.sleep(0.05)
        yield process, json.loads(ready.read_text())
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
