"""The engine process of a decode worker. Its loop is in `engine.worker_loop`, what is particular in `scheduler`."""

import sys

from decode_service.scheduler import DecodeTier
from engine.engine import Engine
from engine.engine_geometry import EngineGeometry
from engine.worker_loop import worker_main


def make_tier(engine: Engine, geometry: EngineGeometry) -> DecodeTier:
    return DecodeTier(engine, geometry.model.fingerprint, geometry.max_local_tokens)


if __name__ == "__main__":
    sys.exit(worker_main(make_tier, is_sender=False))
