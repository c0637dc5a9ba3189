"""An engine's prefix cache as its service sees it: ask for blocks, be told which, say when done with them.

What was asked for is given back even when whoever asked has gone before the answer.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol, TypeVar

from core.ids import BlockHash, HandoffId
from engine.messages import AnyCommand, EndLoan, FetchBlocks, Fetched, Fetching, LendBlocks, Lent

Answer = TypeVar("Answer", Fetching, Lent)


class Engine(Protocol):
    """Where commands go."""

    def send(self, *commands: AnyCommand) -> None: ...


class EngineCache:
    """One per service, on its event loop. Ids are the askers' own; of one id there is one at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: dict[HandoffId, asyncio.Future[Fetching] | asyncio.Future[Lent]] = {}

    async def fetch(self, handoff_id: HandoffId, hashes: Sequence[BlockHash]) -> Fetching:
        """Blocks for those of a chain that are not cached, for the caller to write and then end_fetch(), always."""
        answer: asyncio.Future[Fetching] = asyncio.get_running_loop().create_future()
        self._engine.send(FetchBlocks(handoff_id, list(hashes)))
        return await self._answer(handoff_id, answer)

    def end_fetch(self, handoff_id: HandoffId, is_whole: bool) -> None:
        """Nobody writes into its blocks any more; they are cached from now on, if they are whole."""
        self._engine.send(Fetched(handoff_id, is_whole))

    async def lend(self, handoff_id: HandoffId, hashes: Sequence[BlockHash]) -> Lent:
        """Those of the blocks that are cached, for the caller to read and then end_loan(), always."""
        answer: asyncio.Future[Lent] = asyncio.get_running_loop().create_future()
        self._engine.send(LendBlocks(handoff_id, list(hashes)))
        return await self._answer(handoff_id, answer)

    def end_loan(self, handoff_id: HandoffId) -> None:
        """Nobody reads its blocks any more."""
        self._engine.send(EndLoan(handoff_id))

    def on_event(self, event: Fetching | Lent) -> None:
        """From the engine."""
        answer = self._waiting.pop(event.id, None)
        if answer is not None and not answer.done():
            answer.set_result(event)  # type: ignore[arg-type]  # each id is asked for one of the two
        else:
            self._give_back(event)

    def _give_back(self, event: Fetching | Lent) -> None:
        if isinstance(event, Fetching):
            self.end_fetch(event.id, is_whole=False)
        else:
            self.end_loan(event.id)

    async def _answer(self, handoff_id: HandoffId, answer: "asyncio.Future[Answer]") -> Answer:
        self._waiting[handoff_id] = answer
        try:
            return await answer
        except asyncio.CancelledError:
            if not answer.cancelled():  # it came, and then the asker went
                self._give_back(answer.result())
            raise
