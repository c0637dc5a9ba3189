"""The names of everything Tandem keeps in Redis. The literal braces put a cluster's keys into one hash slot."""

from core.ids import BlockHash, Epoch, HandoffId, WorkerId


class Keys:
    """All under `tandem:{<cluster>}:`."""

    def __init__(self, cluster: str) -> None:
        self.prefix = f"tandem:{{{cluster}}}:"
        self.workers = f"{self.prefix}workers"
        self.events = f"{self.prefix}events"

    def worker(self, worker_id: WorkerId) -> str:
        return f"{self.prefix}worker:{worker_id}"

    def load(self, worker_id: WorkerId) -> str:
        return f"{self.prefix}load:{worker_id}"

    def block(self, block_hash: BlockHash) -> bytes:
        return f"{self.prefix}block:".encode() + block_hash

    def blocks_of(self, worker_id: WorkerId, epoch: Epoch) -> str:
        return f"{self.prefix}blocks:{worker_id}:{epoch}"

    def sequence_of(self, worker_id: WorkerId, epoch: Epoch) -> str:
        return f"{self.prefix}sequence:{worker_id}:{epoch}"

    def handoff(self, handoff_id: HandoffId) -> str:
        return f"{self.prefix}handoff:{handoff_id}"
