"""A worker's engine as a task of the test's own loop, where EngineProcess stands."""

import asyncio
from collections.abc import AsyncIterator

from engine.messages import AnyCommand, Report
from engine.worker_loop import Tier, report


class InlineEngine:
    """Stands where EngineProcess does: one step a tick while `can_step` is set."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.can_step = asyncio.Event()
        self.can_step.set()
        self._commands: asyncio.Queue[AnyCommand] = asyncio.Queue()
        self._reports: asyncio.Queue[Report] = asyncio.Queue()

    def send(self, *commands: AnyCommand) -> None:
        for command in commands:
            self._commands.put_nowait(command)

    async def reports(self) -> AsyncIterator[Report]:
        while True:
            yield await self._reports.get()

    async def run(self) -> None:
        while True:
            self.tier.handle(await self._commands.get())
            await self._steps()

    async def _steps(self) -> None:
        did_work = True
        while did_work:
            await self.can_step.wait()
            try:
                did_work = self.tier.step()
            except RuntimeError as error:
                self.tier.fail_step(error)
            self._reports.put_nowait(report(self.tier))
            while not self._commands.empty():
                self.tier.handle(self._commands.get_nowait())
                did_work = True
            await asyncio.sleep(0)
