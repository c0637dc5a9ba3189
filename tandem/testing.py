"""A real cluster of processes on this host under a test's or a benchmark's control: start, kill, pause, start again.
Unlike `tandem serve` it restarts nothing by itself."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx

from cluster.valkey import EmbeddedValkey
from core.child import dying_with_parent
from core.errors import Unavailable
from core.worker import Role

START_TIMEOUT_S = 120.0
MAX_QUEUE_S = 120.0  # a busy machine is no overload
STOP_TIMEOUT_S = 30.0
POLL_S = 0.05
WORKERS_ONLY = f"/cluster?after={2**53}"  # nothing of what ended


class ManagedProcess:
    """One `tandem ...` process and its log file."""

    def __init__(
        self, name: str, arguments: Sequence[str], directory: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.arguments = tuple(arguments)
        self.log = directory / f"{name}.log"
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        self._process: asyncio.subprocess.Process | None = None

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None, f"{self.name} was not started"
        return self._process

    async def start(self) -> None:
        with self.log.open("ab") as sink:
            self._process = await asyncio.create_subprocess_exec(
                *dying_with_parent([sys.executable, "-m", "tandem.cli", *self.arguments]),
                stdout=sink,
                stderr=sink,
                env=self._environment,
                start_new_session=True,
            )

    def signal_all(self, number: int) -> None:
        """To the process and its children (a worker's engine): they are one process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    async def kill(self) -> None:
        """SIGKILL for the whole group, as a machine's failure would."""
        if self.process.returncode is None:
            self.signal_all(signal.SIGKILL)
        await self.process.wait()

    async def stop(self) -> int:
        """SIGTERM to the service alone; its exit status."""
        if self.process.returncode is None:
            self.process.terminate()
        async with asyncio.timeout(STOP_TIMEOUT_S):
            return await self.process.wait()

    def tail(self, num_bytes: int = 3000) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-num_bytes:]


class LocalCluster:
    """Valkey, workers and a gateway, as an async context manager; `processes` are by name (`prefill-0`, ...)."""

    def __init__(
        self,
        model: str | Path,
        num_prefill: int = 1,
        num_decode: int = 1,
        connector: str = "shm",
        worker_arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        prefill_arguments: Sequence[str] = (),
        decode_arguments: Sequence[str] = (),
        gateway_arguments: Sequence[str] = (),
    ) -> None:
        self.model = str(model)
        self.connector = connector
        self.processes: dict[str, ManagedProcess] = {}
        self.http = ""
        self.grpc = ""
        self.redis_url = ""
        self._counts = {Role.PREFILL: num_prefill, Role.DECODE: num_decode}
        self._worker_arguments = {
            Role.PREFILL: (*worker_arguments, *prefill_arguments),
            Role.DECODE: (*worker_arguments, *decode_arguments),
        }
        self._gateway_arguments = tuple(gateway_arguments)
        self._environment = dict(environment or {})
        self._directory = tempfile.TemporaryDirectory(prefix="tandem-cluster-")
        self._valkey: EmbeddedValkey | None = None

    async def __aenter__(self) -> Self:
        self._valkey = await EmbeddedValkey.start()
        self.redis_url = self._valkey.url
        try:
            for role, count in self._counts.items():
                for index in range(count):
                    await self.add_worker(role, f"{role.value}-{index}")
            await self.start_gateway()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self.processes.values():
            if process.process.returncode is None:
                process.signal_all(signal.SIGCONT)
                await process.kill()
        if self._valkey is not None:
            await self._valkey.stop()
        self._directory.cleanup()

    async def add_worker(
        self,
        role: Role,
        name: str,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> ManagedProcess:
        """Start one worker, new or under the name of one that ended; it registers when its weights are loaded."""
        command = [role.value, "--model", self.model, "--model-id", "test", "--id", name]
        command += ["--redis-url", self.redis_url, "--connector", self.connector]
        return await self._start(name, [*command, *self._worker_arguments[role], *arguments], environment)

    async def start_gateway(self, is_waiting: bool = True, http: str = "127.0.0.1:0") -> ManagedProcess:
        """Start the gateway; returns when it can serve. Raises Unavailable with the logs when it does not."""
        ready = Path(self._directory.name) / "ready.json"
        ready.unlink(missing_ok=True)
        command = ["gateway", "--model", self.model, "--model-id", "test", "--redis-url", self.redis_url]
        command += ["--http", http, "--grpc", "127.0.0.1:0", "--ready-file", str(ready)]
        command += ["--max-queue", str(MAX_QUEUE_S)]
        gateway = await self._start("gateway", [*command, *self._gateway_arguments])
        if is_waiting:
            await self.wait_gateway()
        return gateway

    async def wait_gateway(self) -> None:
        """Until a gateway that was started without waiting can serve. Raises Unavailable with the logs."""
        await self._wait_ready(Path(self._directory.name) / "ready.json")

    async def workers(self) -> list[dict[str, Any]]:
        """`/cluster`'s view of the workers."""
        async with httpx.AsyncClient(base_url=self.http) as client:
            found: list[dict[str, Any]] = (
                (await client.get(WORKERS_ONLY)).raise_for_status().json()["workers"]
            )
        return found

    async def wait_workers(self, names: Sequence[str], timeout_s: float = START_TIMEOUT_S) -> None:
        """Until the gateway has open sessions with exactly these workers. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while {w["record"]["worker_id"] for w in await self.workers() if w["is_up"]} != set(names):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)

    async def wait_idle(self, timeout_s: float = 10.0) -> None:
        """Until every worker's blocks are free or cached and nothing runs or waits. Raises TimeoutError with those
        that are not there yet."""
        busy: dict[str, Any] = {}
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    workers = await self.workers()
                    busy = {w["record"]["worker_id"]: w["load"] for w in workers if not _is_idle(w["load"])}
                    if not busy:
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise TimeoutError(f"after {timeout_s:g} s not idle: {busy}") from None

    async def stop_valkey(self) -> None:
        """Redis goes away."""
        await self.valkey.stop()

    async def start_valkey(self) -> None:
        """Redis comes back on the same port, empty."""
        self._valkey = await EmbeddedValkey.start(self.valkey.port)

    @property
    def valkey(self) -> EmbeddedValkey:
        assert self._valkey is not None, "the cluster is not running"
        return self._valkey

    def logs(self) -> str:
        """The ends of all logs, for a failing test."""
        return "\n".join(f"--- {name}\n{process.tail()}" for name, process in self.processes.items())

    async def _start(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> ManagedProcess:
        own = {**self._environment, **(environment or {})}
        process = ManagedProcess(name, arguments, Path(self._directory.name), own)
        self.processes[name] = process
        await process.start()
        return process

    async def _wait_ready(self, ready: Path) -> None:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not await asyncio.to_thread(ready.exists):
                    if any(process.process.returncode is not None for process in self.processes.values()):
                        raise Unavailable(f"a process ended at start\n{self.logs()}")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise Unavailable(f"the cluster did not become ready\n{self.logs()}") from None
        addresses = json.loads(await asyncio.to_thread(ready.read_text))
        self.http, self.grpc = addresses["http"], addresses["grpc"]


def _is_idle(load: Mapping[str, Any]) -> bool:
    states = load["blocks_by_state"]
    is_settled = states.get("free", 0) + states.get("cached", 0) == load["num_blocks"] > 0
    return is_settled and not load["num_running"] and not load["num_waiting"]
