"""Runs `tandem serve`: starts every process as a child, reports and restarts those that die, stops all on a signal.
Children die with it, however it ends."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

from cluster.valkey import EmbeddedValkey
from core.child import dying_with_parent
from core.model_path import public_name
from core.ready_file import write_ready_file
from tandem.layout import ChildPlan, ServePlan, plan_gateway, plan_workers

logger = logging.getLogger(__name__)
STOP_S = 25.0
RESTART_PAUSE_S = 1.0
READY_POLL_S = 0.1
CONFIGURATION_MISTAKE = 2


class Child:
    """One supervised process. `run()` keeps it alive until `stop()`."""

    def __init__(self, plan: ChildPlan, log_format: str = "text") -> None:
        self.plan = plan
        self._log_format = log_format
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def run(self) -> int:
        """The status of a process that cannot be helped by a restart: a configuration mistake, or a stop."""
        while True:
            status = await self._run_once()
            if self._is_stopping or status == CONFIGURATION_MISTAKE:
                return status
            logger.error(
                "%s (pid %s) ended with status %d: starting another", self.plan.name, self.pid, status
            )
            await asyncio.sleep(RESTART_PAUSE_S)

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after STOP_S; returns when it has ended."""
        self._is_stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            logger.error("%s did not stop within %g s: killed", self.plan.name, STOP_S)
            process.kill()
            await process.wait()

    async def _run_once(self) -> int:
        threads = str(self.plan.num_threads)
        limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
        self._process = await asyncio.create_subprocess_exec(
            *dying_with_parent(self.plan.command, self.plan.cores),
            env={**os.environ, **limits},
            start_new_session=True,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        await self._relay_log(self._process)
        return await self._process.wait()

    async def _relay_log(self, process: asyncio.subprocess.Process) -> None:
        """Each line of the child's log, with its name before it; JSON lines say themselves whose they are, and what
        is none becomes one."""
        assert process.stdout is not None
        async for line in process.stdout:
            text = line.decode(errors="replace").rstrip()
            if self._log_format == "text":
                text = f"{self.plan.name:<10} | {text}"
            elif not text.startswith("{"):
                text = json.dumps({"service": self.plan.name, "message": text})
            sys.stderr.write(f"{text}\n")


async def run(plan: ServePlan, ready_file: str | None) -> int:
    """Everything up, until SIGINT or SIGTERM; the exit status."""
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with contextlib.AsyncExitStack() as stack:
        if not plan.redis_url:
            plan = replace(plan, redis_url=await stack.enter_async_context(_kept_valkey()))
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-"))
        return await _run_children(plan, Path(directory) / "ready.json", ready_file, stopping)


@contextlib.asynccontextmanager
async def _kept_valkey() -> AsyncIterator[str]:
    """The URL of an embedded Valkey that is started again, on the same port, when it dies."""
    valkey = await EmbeddedValkey.start()

    async def keep() -> None:
        nonlocal valkey
        while True:
            status = await valkey.wait()
            logger.error("valkey (pid %d) ended with status %d: starting another", valkey.pid, status)
            valkey = await EmbeddedValkey.start(valkey.port)

    keeping = asyncio.create_task(keep())
    try:
        yield valkey.url
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])
        await valkey.stop()


async def _run_children(
    plan: ServePlan, gateway_file: Path, ready_file: str | None, stopping: asyncio.Event
) -> int:
    cores = sorted(os.sched_getaffinity(0))
    plans = [*plan_workers(plan, cores), plan_gateway(plan, str(gateway_file), cores)]
    children = [Child(child, plan.log_format) for child in plans]
    running = {asyncio.create_task(child.run()) for child in children}
    announcing = asyncio.create_task(_announce(plan, gateway_file, ready_file, children))
    stopped = asyncio.create_task(stopping.wait())
    await asyncio.wait({stopped, *running}, return_when=asyncio.FIRST_COMPLETED)
    status = 0 if stopping.is_set() else next(task.result() for task in running if task.done())
    logger.info("stopping")
    for task in (announcing, stopped):
        task.cancel()
    await _stop_in_order(children)
    await asyncio.gather(*running)
    return status


async def _stop_in_order(children: Sequence[Child]) -> None:
    """The gateway first: it lets streams finish while the workers still serve."""
    *workers, gateway = children
    await gateway.stop()
    await asyncio.gather(*(worker.stop() for worker in workers))


async def _announce(
    plan: ServePlan, gateway_file: Path, ready_file: str | None, children: Sequence[Child]
) -> None:
    """When the gateway says that it can serve: tell the user how to talk to it, and write the ready file."""
    while not gateway_file.exists():  # noqa: ASYNC110, ASYNC240 - another process writes it
        await asyncio.sleep(READY_POLL_S)
    content = json.loads(gateway_file.read_text(encoding="utf-8"))  # noqa: ASYNC240 - a hundred bytes
    content["pids"] = [child.pid for child in children]
    if ready_file is not None:
        write_ready_file(Path(ready_file), content)
    model = plan.model_id or public_name(plan.model)
    sys.stdout.write(welcome(model, content["http"], content["grpc"]))
    sys.stdout.flush()


def welcome(model: str, http: str, grpc: str) -> str:
    """How to talk to a running system, for the terminal."""
    question = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": model, "messages": [question], "temperature": 0, "max_tokens": 64})
    return f"""
Tandem is ready.

  chat       .venv/bin/tandem chat --grpc {grpc}
  complete   .venv/bin/tandem complete --grpc {grpc} "The capital of France is"
  OpenAI     curl {http}/v1/chat/completions -H 'content-type: application/json' -d '{body}'
  look       {http}/cluster   {http}/metrics   .venv/bin/tandem top --url {http}

Ctrl-C stops everything.
"""
