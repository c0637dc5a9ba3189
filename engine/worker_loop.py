"""The engine process of a service: one loop, the same for both tiers. Knows nothing of gRPC, Redis or connectors.

python -m prefill_service.worker --channel-fd 5 --pool-fd 6 --config '{...}'
"""

import argparse
import logging
import os
import signal
import socket
from collections.abc import Callable
from typing import Protocol

import msgspec

from core.clock import monotonic
from core.errors import TandemError
from core.kv_region import KVRegion
from core.load import Load
from core.logs import about, set_up_logs
from engine.block_pool import CacheChange
from engine.channel import EngineChannel
from engine.config import EngineConfig
from engine.engine import Engine
from engine.engine_geometry import EngineGeometry
from engine.messages import AnyCommand, AnyEvent, Loading, Report
from engine.pace import Pace, unpaced
from engine.scheduler import Work

logger = logging.getLogger(__name__)
IDLE_CHECK_S = 1.0
NICENESS = 5  # on full cores those who talk (services, gateway, clients) come before those who compute


class Tier(Protocol):
    """What makes an engine process a prefill or a decode worker."""

    engine: Engine
    events: list[AnyEvent]

    def handle(self, command: AnyCommand) -> None:
        """Apply one command; answers go to `events`."""
        ...

    def prepare(self) -> None:
        """Append what needs no computing: who is refused, who is granted. For the time between two steps."""
        ...

    def step(self) -> bool:
        """Prepare, run one engine step and append its events. False when nothing could run."""
        ...

    def announce(self, work: list[Work]) -> None:
        """Append what the schedule alone decides, before the step computes."""
        ...

    def fail_step(self, error: Exception) -> None:
        """End the requests of a step that raised, each with its own event; the engine goes on."""
        ...

    @property
    def num_waiting(self) -> int: ...


def run_worker(channel: EngineChannel, tier: Tier, pace: Pace | None = None) -> None:
    """Until the service closes the channel: take commands, step, report."""
    pace = pace or unpaced()
    tier.engine.on_scheduled = lambda work: _announce(channel, tier, work)
    channel.send(report(tier))
    did_work = False
    while (messages := channel.receive(pace.left_s if did_work else IDLE_CHECK_S)) is not None:
        for message in messages:
            for command in message.commands:
                tier.handle(command)
        if did_work and pace.left_s:
            tier.prepare()
        else:
            pace.begin()
            did_work = step_or_fail(tier)
        if messages or tier.events or did_work:
            channel.send(report(tier))
        else:
            tier.engine.scheduler.pool.check()


def step_or_fail(tier: Tier) -> bool:
    """A step that raises ends the requests it computed. Without any it was the scheduling that failed, which no
    request's end would mend: then the process ends."""
    tier.engine.work = []
    try:
        return tier.step()
    except Exception as error:
        if not tier.engine.work:
            raise
        names = ",".join(dict.fromkeys(item.sequence.id.request_id for item in tier.engine.work))
        logger.exception("engine step failed", extra=about(names))
        tier.fail_step(error)
        return True


def _announce(channel: EngineChannel, tier: Tier, work: list[Work]) -> None:
    """What is known before the step computes (who was admitted, who was granted) must not wait for it."""
    tier.announce(work)
    if tier.events:
        channel.send(report(tier))


def report(tier: Tier) -> Report:
    """Everything since the last report; empties the tier's events."""
    scheduler = tier.engine.scheduler
    load = Load(
        num_blocks=scheduler.pool.num_blocks,
        num_free_blocks=scheduler.pool.num_available,
        num_queued_tokens=scheduler.num_queued_tokens,
        num_running=len(scheduler.running),
        num_waiting=tier.num_waiting,
        step_s=tier.engine.step_s,
        tokens_per_s=tier.engine.tokens_per_s,
        blocks_by_state={state.value: count for state, count in scheduler.pool.counts.items()},
        num_suspended=scheduler.num_suspended,
        counts=tier.engine.counts.read(scheduler.num_preemptions),
    )
    events, tier.events = tier.events, []
    changes: list[CacheChange] = scheduler.pool.drain_changes()
    return Report(events, load, [(change.is_stored, change.block_hash) for change in changes])


def worker_main(make_tier: Callable[[Engine, EngineGeometry], Tier], is_sender: bool) -> int:
    """The body of a tier's `python -m ...worker`. `is_sender`: its blocks leave through the region."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.add_argument("--pool-fd", type=int, required=True)
    parser.add_argument("--config", required=True)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    config = msgspec.json.decode(args.config, type=EngineConfig)
    set_up_logs(config.log)
    channel = EngineChannel(socket.socket(fileno=args.channel_fd))
    from kernels.cpu import crew  # torch comes with it

    pace = Pace(config.pace_s, monotonic, crew.are_others_at_work, crew.lend_core)
    try:
        try:
            tier = make_tier(*_load(config, channel, args.pool_fd, is_sender))
        except TandemError as error:
            channel.send(Report([], failure=str(error)))
            return 2
        run_worker(channel, tier, pace)
    except ConnectionError:
        logger.info("the service is gone")
    return 0


def _load(
    config: EngineConfig, channel: EngineChannel, pool_fd: int, is_sender: bool
) -> tuple[Engine, EngineGeometry]:
    import torch

    from engine.build import build_engine
    from kernels.cpu.crew import start_crew

    torch.set_num_threads(config.num_threads)
    start_crew(config.num_threads, config.borrowed_cores)
    geometry = EngineGeometry(config)
    region = KVRegion.attach(pool_fd, geometry.kv_spec.block_bytes, geometry.num_blocks)

    def on_progress(done_bytes: int, total_bytes: int) -> None:
        channel.send(Loading(done_bytes, total_bytes))

    engine = build_engine(config, geometry, region, on_progress, is_sender)
    if engine.guides is not None:
        engine.guides.prepare()
        engine.guides.on_ready = channel.wake
    return engine, geometry
