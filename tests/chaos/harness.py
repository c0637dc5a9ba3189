"""`make chaos SEED=n`: a real cluster of processes under load while things are killed, paused, delayed, corrupted and
cut off. Prints what was done and how it was absorbed; exits 1 unless every request had one end, every answer is that
of one process, every block came back, nothing hung and nothing grew without bound."""

import argparse
import asyncio
import itertools
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from core.kv_spec import DType
from core.model_path import resolve_model
from core.worker import Role
from engine.config import EngineConfig
from engine.llm import LLM
from engine.testing import make_tiny_model
from tandem.testing import LocalCluster
from tests.chaos.asked import Asks, Record, judge
from tests.chaos.asking import ask
from tests.chaos.proxy import ProxiedCluster
from tests.chaos.wishes import random_request

WORKERS = {
    "prefill-0": Role.PREFILL,
    "prefill-1": Role.PREFILL,
    "decode-0": Role.DECODE,
    "decode-1": Role.DECODE,
}
WORKER_ARGUMENTS = ("--dtype", "float32", "--num-blocks", "160", "--token-budget", "128", "--max-batch", "12")
NUM_AT_ONCE = 10
MAX_GROWTH_BYTES = 300 << 20
TRANSFER_FAULTS = (
    {},
    {"corrupts": True, "every": 3},
    {"drops_seal": True, "every": 5},
    {"fails_at": "open", "every": 4},
    {"fails_at": "send", "every": 4},
    {"fails_at": "seal", "every": 4},
    {"delay_s": 0.2},
    {"reorders": True},
    {"duplicates": True, "every": 3},
    {"drops_run": True, "every": 3},
    {"seal_first": True, "every": 3},
)


class Chaos:
    def __init__(
        self, cluster: ProxiedCluster, asks: Asks, seed: int, num_requests: int, num_faults: int
    ) -> None:
        self.cluster = cluster
        self.asks = asks
        self.random = random.Random(seed)
        self.records: list[Record] = []
        self.injected: Counter[str] = Counter()
        self.transfer_faults: Counter[str] = Counter()
        self.absorbed: Counter[tuple[str, str]] = Counter()
        self._transfer_faults = itertools.cycle(self.random.sample(TRANSFER_FAULTS, len(TRANSFER_FAULTS)))
        self._num_requests = num_requests
        self._num_faults = num_faults
        self._live: set[int] = set()
        self._busy: set[str] = set()
        self._repairs: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Load until all requests are asked and all faults are injected, then heal."""
        gate = asyncio.Semaphore(NUM_AT_ONCE)
        telling = asyncio.create_task(self._tell())
        asking = asyncio.create_task(self._harm())
        requests = []
        for _ in range(self._num_requests):
            await gate.acquire()
            request = asyncio.create_task(self._one())
            request.add_done_callback(lambda _: gate.release())
            requests.append(request)
            await asyncio.sleep(self.random.expovariate(12.0))
        while not asking.done():
            requests.append(asyncio.create_task(self._one()))
            await asyncio.sleep(0.3)
        await asking
        await asyncio.gather(*requests)
        await asyncio.gather(*self._repairs)
        telling.cancel()

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(10)
            faults = sum(self.injected.values())
            under = ", ".join(sorted(self._busy)) or "nothing"
            sys.stderr.write(
                f"{len(self.records)} requests, {len(self._live)} live, {faults} faults, under repair: {under}\n"
            )

    async def _one(self) -> None:
        record = self._random_record()
        index = len(self.records)
        self.records.append(record)
        self._live.add(index)
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(record.leaves_after_s):
                await ask(self.cluster.grpc, record)
        except TimeoutError:
            if record.num_ends == 0:  # or it left in the moment in which its end had come
                record.outcome = "client left"
                record.num_ends += 1
        finally:
            record.took_s = time.monotonic() - started_s
            self._live.discard(index)
        for fault in set(record.faults_meanwhile):
            self.absorbed[fault, record.outcome] += 1

    def _random_record(self) -> Record:
        rng, asks = self.random, self.asks
        record = Record(random_request(rng, asks.vocab_size, asks.prompt_lengths, asks.output_lengths))
        after_s = rng.random() ** 2 * 1.5
        match rng.choices(("stays", "leaves", "aborts", "comes back"), (65, 12, 8, 15))[0]:
            case "leaves":
                record.leaves_after_s = after_s
            case "aborts":
                record.aborts_after_s = after_s
            case "comes back":
                record.request.resumable = True
        return record

    async def _harm(self) -> None:
        kinds: list[Callable[[], Awaitable[str]]] = [
            self._kill, self._kill, self._pause, self._pause, self._refault, self._refault, self._cut, self._delay,
            self._redis_gone, self._redis_flushed, self._redis_paused,
        ]  # fmt: skip
        while sum(self.injected.values()) < self._num_faults:
            await asyncio.sleep(self.random.expovariate(1.5))
            name = await self.random.choice(kinds)()
            if name:
                self.injected[name] += 1
                for index in self._live:
                    self.records[index].faults_meanwhile.append(name)

    def _victim(self, *roles: Role) -> str | None:
        """A worker that is well, of one of `roles` if they are given, leaving at least one of its tier."""
        well = [name for name in WORKERS if name not in self._busy and WORKERS[name] in (roles or Role)]
        spare = [n for n in well if sum(WORKERS[o] is WORKERS[n] for o in well) > 1]
        return self.random.choice(spare) if spare else None

    def _repair(self, name: str, work: Awaitable[None]) -> None:
        async def repair() -> None:
            try:
                await work
            finally:
                self._busy.discard(name)

        self._busy.add(name)
        task = asyncio.create_task(repair())
        self._repairs.add(task)
        task.add_done_callback(self._repairs.discard)

    async def _kill(self) -> str:
        name = self._victim()
        if name is None:
            return ""
        await self.cluster.processes[name].kill()
        self._repair(name, self._start(name))
        return f"SIGKILL {WORKERS[name]}"

    async def _refault(self) -> str:
        """A prefill worker that stops as told to and comes back with broken transfers."""
        name = self._victim(Role.PREFILL)
        if name is None:
            return ""
        self._repair(name, self._replace(name))
        return "SIGTERM prefill, then broken transfers"

    async def _replace(self, name: str) -> None:
        status = await self.cluster.processes[name].stop()
        assert status == 0, f"{name} exited with {status}"
        await self._start(name)

    async def _start(self, name: str) -> None:
        faults = next(self._transfer_faults) if WORKERS[name] is Role.PREFILL else {}
        environment = {"TANDEM_FAULTS": json.dumps(faults)} if faults else {}
        if faults:
            self.transfer_faults[", ".join(f"{fault} {value}" for fault, value in faults.items())] += 1
        await self.cluster.add_worker(WORKERS[name], name, environment=environment)
        await self._wait_up(name)

    async def _wait_up(self, name: str) -> None:
        async with asyncio.timeout(40):
            while name not in {w["record"]["worker_id"] for w in await self.cluster.workers() if w["is_up"]}:
                await asyncio.sleep(0.1)

    async def _pause(self) -> str:
        name = self._victim()
        if name is None:
            return ""
        duration_s = self.random.choice((0.3, 1.0, 5.0))
        self.cluster.processes[name].signal_all(signal.SIGSTOP)
        self._repair(name, self._resume(name, duration_s))
        return f"SIGSTOP {WORKERS[name]} {duration_s:g} s"

    async def _resume(self, name: str, duration_s: float) -> None:
        await asyncio.sleep(duration_s)
        self.cluster.processes[name].signal_all(signal.SIGCONT)
        await self._wait_up(name)

    async def _cut(self) -> str:
        """Connections to a worker are reset, and refused for a while."""
        name = self._victim()
        if name is None:
            return ""
        duration_s = self.random.choice((0.0, 1.0, 5.0))
        self.cluster.proxies[name].cut()
        self._repair(name, self._pass_again(name, duration_s))
        return f"{WORKERS[name]} cut off {duration_s:g} s"

    async def _delay(self) -> str:
        """What a worker and the gateway say to each other is late: by so much that the session breaks, or less."""
        name = self._victim()
        if name is None:
            return ""
        delay_s = self.random.choice((0.1, 1.0, 5.0))
        self.cluster.proxies[name].delay_s = delay_s
        self._repair(name, self._pass_again(name, 5.0))
        return f"{WORKERS[name]} heard {delay_s:g} s late"

    async def _pass_again(self, name: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self.cluster.proxies[name].heal()
        await self._wait_up(name)

    async def _redis_gone(self) -> str:
        if "redis" in self._busy:
            return ""
        await self.cluster.stop_valkey()
        self._repair("redis", self._redis_back())
        return "Redis killed, back empty"

    async def _redis_back(self) -> None:
        await asyncio.sleep(self.random.choice((0.5, 4.0)))
        await self.cluster.start_valkey()

    async def _redis_flushed(self) -> str:
        if "redis" in self._busy:
            return ""
        from redis.asyncio import Redis

        async with Redis.from_url(self.cluster.redis_url) as redis:
            await redis.flushall()
        return "Redis FLUSHALL"

    async def _redis_paused(self) -> str:
        if "redis" in self._busy:
            return ""
        process = psutil.Process(self.cluster.valkey.pid)
        process.suspend()

        async def resume() -> None:
            await asyncio.sleep(self.random.choice((0.3, 4.0)))
            process.resume()

        self._repair("redis", resume())
        return "Redis paused"


def memory_of(cluster: LocalCluster) -> dict[str, int]:
    """Resident bytes of each process group, the pool aside."""
    sizes = {}
    for name, managed in cluster.processes.items():
        process = psutil.Process(managed.process.pid)
        sizes[name] = sum(p.memory_full_info().uss for p in (process, *process.children(recursive=True)))
    return sizes


async def run(seed: int, num_requests: int, num_faults: int, model: str | None) -> int:
    console = Console(width=140)
    with tempfile.TemporaryDirectory() as directory:
        path = resolve_model(model) if model else make_tiny_model(Path(directory) / "tiny")
        asks = Asks.of(path, is_tiny=model is None)
        async with ProxiedCluster(path, 2, 2, "auto", WORKER_ARGUMENTS) as cluster:
            await cluster.wait_workers(list(WORKERS))
            before = memory_of(cluster)
            chaos = Chaos(cluster, asks, seed, num_requests, num_faults)
            try:
                await chaos.run()
                await cluster.wait_workers(list(WORKERS))
            except BaseException:
                sys.stderr.write(cluster.logs())
                raise
            wrong = []
            try:
                await cluster.wait_idle(20)
            except TimeoutError:
                wrong.append(f"blocks did not come back: {[w['load'] for w in await cluster.workers()]}")
            grown = {name: size - before[name] for name, size in memory_of(cluster).items()}
            wrong += [f"{n} grew by {g >> 20} MiB" for n, g in grown.items() if g > MAX_GROWTH_BYTES]
            logs = cluster.logs()
        llm = LLM(EngineConfig(str(path), DType.FLOAT32, num_blocks=1200, enable_prefix_cache=False))
        wrong += await asyncio.to_thread(judge, chaos.records, llm, asks)
        llm.close()
    show(console, seed, chaos)
    for line in wrong:
        console.print(f"[red]WRONG[/red] {line}")
    if wrong:
        sys.stderr.write(logs)
    console.print("FAILED" if wrong else "nothing wrong, nothing leaked, nothing hung")
    return 1 if wrong else 0


def show(console: Console, seed: int, chaos: Chaos) -> None:
    outcomes = sorted({record.outcome for record in chaos.records})
    table = Table(title=f"seed {seed}: {len(chaos.records)} requests, {sum(chaos.injected.values())} faults")
    for column in ("fault", "injected", *outcomes):
        table.add_column(column)
    for fault, count in sorted(chaos.injected.items()):
        table.add_row(fault, str(count), *(str(chaos.absorbed[fault, outcome] or "") for outcome in outcomes))
    totals = Counter(record.outcome for record in chaos.records)
    table.add_row("all requests", "", *(str(totals[outcome]) for outcome in outcomes), style="bold")
    console.print(table)
    for faults, count in sorted(chaos.transfer_faults.items()):
        console.print(f"prefill workers started with {faults}: {count}")
    longest = max(record.took_s for record in chaos.records)
    console.print(
        f"columns count the requests that ran when a fault of the row fell; the longest took {longest:.1f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument(
        "--model", default=None, help="Model directory, GGUF file or `smollm2` [a tiny random one]."
    )
    args = parser.parse_args()
    return asyncio.run(run(args.seed, args.requests, args.faults, args.model))


if __name__ == "__main__":
    sys.exit(main())
