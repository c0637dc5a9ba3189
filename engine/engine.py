"""An engine: a scheduler, a block pool and a model, stepped. Knows nothing of services, processes or handoffs."""

from collections.abc import Callable

from core.clock import Clock, monotonic
from core.kv_region import KVRegion
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.engine_geometry import EngineGeometry
from engine.kv_pool import KVPool
from engine.model import LlamaModel
from engine.runner import ModelRunner, Runner
from engine.scheduler import Progress, Scheduler, SchedulerLimits, Work


class Engine:
    """step() is the whole story: schedule, forward and sample, commit. `on_scheduled` is called between the first
    two; `work` is the latest schedule, also after a step that raised."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.step_s = 0.0
        self.work: list[Work] = []
        self.on_scheduled: Callable[[list[Work]], None] = lambda work: None

    def step(self) -> list[Progress]:
        """Compute one batch; empty when nothing could run. Finished sequences still own their blocks."""
        started_s = self.scheduler.clock()
        self.work = self.scheduler.schedule()
        if not self.work:
            return []
        self.on_scheduled(self.work)
        sampled = self.runner.run(self.work)
        progress = self.scheduler.commit(self.work, sampled)
        self.step_s = self.scheduler.clock() - started_s
        return progress


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
    model = LlamaModel.load(geometry.path, geometry.model, config.dtype, config.device, on_progress)
    pool = KVPool.over(region, geometry.kv_spec)
    runner = ModelRunner(model, pool, config.block_size, config.device)
    return Engine(build_scheduler(config, geometry), runner)
