"""A worker's connections, as its configuration says."""

from cluster.worker_server import WorkerConfig
from core.ids import Epoch
from core.kv_region import KVRegion
from core.kv_spec import KVSpec
from kv_transfer.base import Identity, TransferOptions
from kv_transfer.connections import Connections
from kv_transfer.faults import Faults


def connect(
    config: WorkerConfig, region: KVRegion, spec: KVSpec, epoch: Epoch, faults: Faults | None = None
) -> Connections:
    """Over `region`, not yet listening."""
    ucx_port = config.transfer_port if config.connector == "ucx" else 0
    options = TransferOptions(config.host, config.advertised_host, config.transfer_port, ucx_port)
    return Connections(config.connector, region, Identity(config.worker_id, epoch, spec), options, faults)
