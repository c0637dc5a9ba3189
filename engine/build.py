"""Putting an engine together from files and a KV region. The one place that knows all its parts."""

from collections.abc import Callable

import torch

from core.clock import Clock, monotonic
from core.errors import EngineFailed
from core.kv_region import KVRegion
from core.kv_spec import DType
from engine.block_pool import BlockPool
from engine.config import EngineConfig, WeightForm
from engine.engine import Engine, Runner
from engine.engine_geometry import EngineGeometry
from engine.guided import GuideFactory
from engine.host_mirror import HostMirror, PublishingRunner
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
    is_sender: bool = False,
) -> Engine:
    """Load the weights and put an engine over `region`, which the caller keeps owning: on a CPU it is the pool,
    elsewhere the pool's mirror, where a sender's engine publishes what it computes. Raises ModelLoadError, and
    EngineFailed where there is no such device."""
    is_on_cpu = torch.device(config.device).type == "cpu"
    if not is_on_cpu and not torch.cuda.is_available():
        raise EngineFailed(f"torch finds no GPU here for the device {config.device!r}")
    keeps_quantized = config.weights is WeightForm.STORED and config.dtype is DType.BFLOAT16
    model = LlamaModel.load(
        geometry.path, geometry.model, config.dtype, config.device, on_progress, keeps_quantized
    )
    scheduler = build_scheduler(config, geometry)
    guides = GuideFactory(geometry.path, geometry.model.vocab_size)
    if is_on_cpu:
        pool = KVPool.over(region, geometry.kv_spec)
        return Engine(scheduler, ModelRunner(model, pool, config.block_size, config.device), guides=guides)
    pool = KVPool.allocate(geometry.kv_spec, geometry.num_blocks, config.device)
    runner = ModelRunner(model, pool, config.block_size, config.device)
    return mirrored_engine(scheduler, runner, HostMirror(pool, region), is_sender, guides)


def mirrored_engine(
    scheduler: Scheduler,
    runner: Runner,
    mirror: HostMirror,
    is_sender: bool,
    guides: GuideFactory | None = None,
) -> Engine:
    """An engine whose pool is not the region but mirrored there. A sender's cached blocks are there already."""
    if is_sender:
        runner = PublishingRunner(runner, mirror, scheduler.limits.block_size)
        return Engine(scheduler, runner, mirror.take_in, guides=guides)
    return Engine(scheduler, runner, mirror.take_in, mirror.publish, guides)
