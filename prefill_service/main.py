"""One prefill worker as a process: engine process, connectors, gRPC server. `tandem prefill` runs it."""

import asyncio
import logging
import os
from pathlib import Path

import msgspec

from cluster.background import keep_running
from cluster.tracing import start_tracing
from cluster.worker_server import LoadingLog, WorkerConfig, WorkerServer
from core.errors import EngineFailed
from core.kv_spec import KVSpec
from core.worker import Role, WorkerRecord
from engine.config import EngineConfig
from engine.engine_geometry import EngineGeometry
from engine.engine_process import EngineProcess
from kv_cache.block_service import BLOCKS_SERVICE, BlockService
from kv_cache.connecting import connect
from kv_cache.disk_store import DiskStore
from kv_cache.disk_tier import DiskTier
from kv_transfer.base import Identity
from kv_transfer.connectors import check_connector
from kv_transfer.faults import Faults
from prefill_service.service import PrefillService
from proto import blocks_pb2_grpc, convert, session_pb2, session_pb2_grpc

logger = logging.getLogger(__name__)
FAULTS_VARIABLE = "TANDEM_FAULTS"
SAVE_LIMIT_S = 5.0
"""For what is not on disk yet when the worker stops."""


async def serve(config: WorkerConfig, engine_config: EngineConfig) -> int:
    """Until told to stop; the exit status. Raises ModelLoadError and ValueError for a wrong configuration."""
    check_connector(config.connector)
    geometry = EngineGeometry(engine_config)
    store = _open_disk(config, engine_config, geometry.kv_spec)
    server = WorkerServer(config)
    record = server.bind(geometry.shape(Role.PREFILL))
    try:
        engine = await EngineProcess.start("prefill_service.worker", engine_config, geometry, LoadingLog())
    except EngineFailed as error:
        logger.error("%s", error)
        return 1
    connections = connect(config, engine.region, geometry.kv_spec, server.epoch, _faults())
    await connections.start()
    tracing = start_tracing(config.otlp, "tandem-prefill", config.worker_id)
    hello = convert.hello_to_proto(record)
    service = PrefillService(
        hello, connections.identity, engine, connections.senders, server.publisher, tracing
    )
    session_pb2_grpc.add_PrefillServicer_to_server(service, server.server)
    blocks = BlockService(service.cache, connections)
    blocks_pb2_grpc.add_BlocksServicer_to_server(blocks, server.server)
    names = [session_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name, BLOCKS_SERVICE]
    saving: asyncio.Task[None] | None = None
    if store is not None:
        disk = DiskTier(store, engine.region, geometry.kv_spec, service.cache, server.publisher.note)
        service.disk = blocks.disk = disk
        saving = asyncio.create_task(keep_running("saving blocks", disk.run))
    follow = asyncio.create_task(service.follow_engine())

    async def renew(record: WorkerRecord) -> None:
        earlier = connections.renew(Identity(record.worker_id, record.epoch, record.kv_spec))
        service.renew(convert.hello_to_proto(record), connections.identity, connections.senders)
        await blocks.renew()
        await earlier.close()

    try:
        return await server.run(record, names, follow, service, renew)
    finally:
        if saving is not None:
            saving.cancel()
            await asyncio.wait([saving])
            await disk.close(0.0 if follow.done() else SAVE_LIMIT_S)
        await connections.close()
        await engine.stop()
        await tracing.close()


def _open_disk(config: WorkerConfig, engine: EngineConfig, spec: KVSpec) -> DiskStore | None:
    """The files of an earlier start of this worker, if they are to be kept. Raises ValueError."""
    if config.disk_cache is None:
        return None
    content = f"{spec} {engine.weights} {engine.device}"
    return DiskStore(Path(config.disk_cache), content, spec.block_bytes, config.disk_cache_bytes)


def _faults() -> Faults | None:
    """Those of transfers that a test asks for, as JSON in TANDEM_FAULTS."""
    faults = os.environ.get(FAULTS_VARIABLE)
    if faults is None:
        return None
    logger.warning("faults are injected into transfers: %s", faults)
    return msgspec.json.decode(faults, type=Faults)
