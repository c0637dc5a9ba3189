"""One prefill worker as a process: engine process, connectors, gRPC server. `tandem prefill` runs it."""

import asyncio
import logging
import os

import msgspec

from cluster.tracing import start_tracing
from cluster.worker_server import LoadingLog, WorkerConfig, WorkerServer
from core.errors import EngineFailed
from core.kv_region import KVRegion
from core.worker import Role, WorkerRecord
from engine.config import EngineConfig
from engine.engine_geometry import EngineGeometry
from engine.engine_process import EngineProcess
from kv_transfer.base import Identity, TransferOptions
from kv_transfer.connectors import SenderSet, check_connector, create_senders
from kv_transfer.faults import Faults, FaultySender, create_faulty_senders
from prefill_service.service import PrefillService
from proto import convert, session_pb2, session_pb2_grpc

logger = logging.getLogger(__name__)
FAULTS_VARIABLE = "TANDEM_FAULTS"


async def serve(config: WorkerConfig, engine_config: EngineConfig) -> int:
    """Until told to stop; the exit status. Raises ModelLoadError and ValueError for a wrong configuration."""
    check_connector(config.connector)
    geometry = EngineGeometry(engine_config)
    server = WorkerServer(config)
    record = server.bind(geometry.shape(Role.PREFILL))
    try:
        engine = await EngineProcess.start("prefill_service.worker", engine_config, geometry, LoadingLog())
    except EngineFailed as error:
        logger.error("%s", error)
        return 1
    identity = Identity(config.worker_id, server.epoch, geometry.kv_spec)
    ucx_port = config.transfer_port if config.connector == "ucx" else 0
    options = TransferOptions(config.host, config.advertised_host, config.transfer_port, ucx_port)
    senders = _make_senders(config.connector, engine.region, identity, options)
    tracing = start_tracing(config.otlp, "tandem-prefill", config.worker_id)
    hello = convert.hello_to_proto(record)
    service = PrefillService(hello, identity, engine, senders, server.publisher, tracing)
    session_pb2_grpc.add_PrefillServicer_to_server(service, server.server)
    names = [session_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name]
    follow = asyncio.create_task(service.follow_engine())

    async def renew(record: WorkerRecord) -> None:
        identity = Identity(record.worker_id, record.epoch, record.kv_spec)
        fresh = _make_senders(config.connector, engine.region, identity, options)
        await service.renew(convert.hello_to_proto(record), identity, fresh).close()

    try:
        return await server.run(record, names, follow, service, renew)
    finally:
        await service.senders.close()
        await engine.stop()
        await tracing.close()


def _make_senders(
    connector: str, region: KVRegion, identity: Identity, options: TransferOptions
) -> SenderSet | FaultySender:
    """Senders; faulty ones, as JSON in TANDEM_FAULTS describes, when a test asks for them."""
    faults = os.environ.get(FAULTS_VARIABLE)
    if faults is None:
        return create_senders(connector, region, identity, options)
    logger.warning("faults are injected into transfers: %s", faults)
    return create_faulty_senders(
        msgspec.json.decode(faults, type=Faults), connector, region, identity, options
    )
