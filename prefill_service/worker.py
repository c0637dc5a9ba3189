"""The engine process of a prefill worker. Its loop is in `engine.worker_loop`, what is particular in `scheduler`."""

import sys

from engine.engine import Engine
from engine.engine_geometry import EngineGeometry
from engine.worker_loop import worker_main
from prefill_service.scheduler import PrefillTier


def make_tier(engine: Engine, geometry: EngineGeometry) -> PrefillTier:
    return PrefillTier(engine, geometry.model.fingerprint)


if __name__ == "__main__":
    sys.exit(worker_main(make_tier, is_sender=True))
