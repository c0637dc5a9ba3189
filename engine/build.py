"""Putting an engine together from files and a KV region. The one place that knows all its parts."""

from collections.abc import Callable

from core.clock import Clock, monotonic
from core.kv_region import KVRegion
from core.kv_spec import DType
from engine.block_pool import BlockPool
from engine.config import EngineConfig, WeightForm
from engine.engine import Engine
from engine.engine_geometry import EngineGeometry
from engine.kv_pool import KVPool
from engine.model import LlamaModel
from engine.runner import ModelRunner
from engine.scheduler import Scheduler, SchedulerLimits


def build_scheduler(config: EngineConfig, geometry: EngineGeometry, clock: Clock = monotonic) -> Scheduler:
    limits = SchedulerLimits(config.block_size, config.token_budget, config.max_batch, geometry.context_len)
    return Scheduler(limits, BlockPool(geometry.num_blocks, config.enable_prefix_cache), clock)


def build_engine(
    config: EngineConfig,
    geometry: EngineGeometry,
    region: KVRegion,
    on_progress: Callable[[int, int], None] | None = None,
) -> Engine:
    """Load the weights and put an engine over `region`, which the caller keeps owning."""
    keeps_quantized = config.weights is WeightForm.STORED and config.dtype is DType.BFLOAT16
    model = LlamaModel.load(
        geometry.path, geometry.model, config.dtype, config.device, on_progress, keeps_quantized
    )
    pool = KVPool.over(region, geometry.kv_spec)
    runner = ModelRunner(model, pool, config.block_size, config.device)
    return Engine(build_scheduler(config, geometry), runner)
