"""One decode worker as a process: engine process, connectors, gRPC server. `tandem decode` runs it."""

import asyncio
import logging

from cluster.tracing import start_tracing
from cluster.worker_server import LoadingLog, WorkerConfig, WorkerServer
from core.errors import EngineFailed
from core.grant import GrantSigner
from core.worker import Role, WorkerRecord
from decode_service.handoff import Granter
from decode_service.service import DecodeService
from engine.config import EngineConfig
from engine.engine_geometry import EngineGeometry
from engine.engine_process import EngineProcess
from kv_transfer.base import Identity, TransferOptions
from kv_transfer.connectors import check_connector, create_receivers
from proto import convert, session_pb2, session_pb2_grpc

logger = logging.getLogger(__name__)


async def serve(config: WorkerConfig, engine_config: EngineConfig) -> int:
    """Until told to stop; the exit status. Raises ModelLoadError and ValueError for a wrong configuration."""
    check_connector(config.connector)
    geometry = EngineGeometry(engine_config)
    server = WorkerServer(config)
    record = server.bind(geometry.shape(Role.DECODE))
    try:
        engine = await EngineProcess.start("decode_service.worker", engine_config, geometry, LoadingLog())
    except EngineFailed as error:
        logger.error("%s", error)
        return 1
    identity = Identity(config.worker_id, server.epoch, geometry.kv_spec)
    ucx_port = config.transfer_port if config.connector == "ucx" else 0
    options = TransferOptions(config.host, config.advertised_host, config.transfer_port, ucx_port)
    signer = GrantSigner()
    receivers = create_receivers([config.connector], engine.region, identity, signer.verify, options)
    await receivers.start()
    granter = Granter(config.worker_id, server.epoch, signer, receivers)
    tracing = start_tracing(config.otlp, "tandem-decode", config.worker_id)
    service = DecodeService(convert.hello_to_proto(record), engine, granter, server.publisher, tracing)
    session_pb2_grpc.add_DecodeServicer_to_server(service, server.server)
    names = [session_pb2.DESCRIPTOR.services_by_name["Decode"].full_name]
    follow = asyncio.create_task(service.follow_engine())

    async def renew(record: WorkerRecord) -> None:
        signer = GrantSigner()
        granter = Granter(record.worker_id, record.epoch, signer, receivers)
        service.renew(convert.hello_to_proto(record), granter)
        receivers.renew(Identity(record.worker_id, record.epoch, record.kv_spec), signer.verify)

    try:
        return await server.run(record, names, follow, service, renew)
    finally:
        await receivers.close()
        await engine.stop()
        await tracing.close()
