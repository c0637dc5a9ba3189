"""The frame of a worker's service process: gRPC server with health and reflection, registration, drain and stop.
The same for both tiers; knows nothing of engines, handoffs or the session messages."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.background import keep_running
from cluster.block_index import BlockPublisher
from cluster.registry import Registration
from cluster.session import SILENCE_S
from cluster.store import Store
from core.clock import loop_time
from core.ids import Epoch, WorkerId, new_epoch
from core.load import Load
from core.worker import WorkerRecord, WorkerShape

logger = logging.getLogger(__name__)
DRAIN_S = 20.0
DRAIN_POLL_S = 0.05
PAUSE_CHECK_S = 0.25
MAX_MESSAGE_BYTES = 64 << 20
SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The network side of one worker. `listen` is host:port (port 0: a free one); `advertised_host` is the name that
    gateways and peers use, the bound host unless given; `connector` one of kv_transfer's or `auto`; spans go to
    `otlp`, if anywhere. `disk_cache` is a directory of its own for at most `disk_cache_bytes`, if any."""

    worker_id: WorkerId
    model: str
    listen: str = "127.0.0.1:0"
    advertised_host: str | None = None
    redis_url: str = "redis://127.0.0.1:6379/0"
    cluster: str = "default"
    connector: str = "auto"
    transfer_port: int = 0
    drain_s: float = DRAIN_S
    otlp: str | None = None
    disk_cache: str | None = None
    disk_cache_bytes: int = 8 << 30

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0]


Renew = Callable[[WorkerRecord], Awaitable[None]]
"""Ends all sessions and handoffs and goes on as the record's incarnation."""


class Host(Protocol):
    """The tier's service, as far as its frame needs it."""

    @property
    def load(self) -> Load: ...

    @property
    def num_handoffs(self) -> int: ...

    def drain(self) -> None:
        """Have gateways send nothing new."""
        ...


class WorkerServer:
    """One worker: its epoch, its address, its presence in the registry."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.epoch: Epoch = new_epoch()
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        self.store = Store(config.redis_url, config.cluster)
        self.publisher = BlockPublisher(self.store, config.worker_id, self.epoch)
        self._health = health.aio.HealthServicer()
        self._stop = asyncio.Event()

    def bind(self, shape: WorkerShape) -> WorkerRecord:
        """Take the port; what this incarnation says of itself. Raises OSError when the port is taken."""
        try:
            port = self.server.add_insecure_port(self.config.listen)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self.config.listen}: {error}") from error
        return WorkerRecord(
            worker_id=self.config.worker_id,
            epoch=self.epoch,
            address=f"{self.config.advertised_host or self.config.host}:{port}",
            model=self.config.model,
            connector=self.config.connector,
            **shape._asdict(),
        )

    async def run(
        self,
        record: WorkerRecord,
        services: Iterable[str],
        follow_engine: asyncio.Task[None],
        host: Host,
        renew: Renew,
    ) -> int:
        """Serve until SIGTERM, SIGINT or the engine's end, drain, deregister; the exit status."""
        await self._start(services)
        registration = Registration(self.store, record, lambda: host.load, self.publisher.republish)
        loops: dict[str, Callable[[], Awaitable[None]]] = {
            "registration": registration.run,
            "publishing blocks": self.publisher.run,
            "fencing": partial(self._fence_after_pauses, registration, renew),
        }
        background = [asyncio.create_task(keep_running(name, loop)) for name, loop in loops.items()]
        logger.info("%s %s serves on %s", record.role, record.worker_id, record.address)
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait([stopped, follow_engine], return_when=asyncio.FIRST_COMPLETED)
        engine_died = follow_engine.done()
        if engine_died:
            logger.error("the engine process ended", exc_info=follow_engine.exception())
        await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        for task in (*background, stopped):
            task.cancel()
        await asyncio.gather(*background, stopped, return_exceptions=True)
        host.drain()
        await registration.leave()
        if not engine_died:
            await self._drain(host)
        await self.publisher.withdraw()
        await self.server.stop(grace=1.0)
        await self.store.close()
        return 1 if engine_died else 0

    async def _fence_after_pauses(self, registration: Registration, renew: Renew) -> None:
        """A process that stood still for longer than a session may be silent was taken for dead meanwhile, and what
        it held was given to others: it goes on as another incarnation, with nothing."""
        while True:
            before_s = loop_time()
            await asyncio.sleep(PAUSE_CHECK_S)
            paused_s = loop_time() - before_s - PAUSE_CHECK_S
            if paused_s > SILENCE_S:
                record = replace(registration.record, epoch=new_epoch())
                logger.warning("stood still for %.1f s: fenced, epoch %d now", paused_s, record.epoch)
                await renew(record)
                registration.record = record
                await self.publisher.renew(record.epoch)

    async def _start(self, services: Iterable[str]) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection(
            (*services, health.SERVICE_NAME, reflection.SERVICE_NAME), self.server
        )
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self.server.start()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)

    async def _drain(self, host: Host) -> None:
        """Let what runs finish, at most drain_s; whatever is left ends with its session."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self.config.drain_s
        while host.num_handoffs and loop.time() < until_s:  # noqa: ASYNC110 - two conditions, one at a time
            await asyncio.sleep(DRAIN_POLL_S)


class LoadingLog:
    """For EngineProcess.start: a line whenever another quarter of the weights is loaded."""

    def __init__(self) -> None:
        self._num_quarters = 0

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        num_quarters = 4 * done_bytes // max(total_bytes, 1)
        if num_quarters > self._num_quarters:
            self._num_quarters = num_quarters
            logger.info("loading weights: %d %%", 25 * num_quarters)
