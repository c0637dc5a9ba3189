"""Loops that must run as long as their process does. Knows nothing of what they do."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)
RESTART_S = 1.0


async def keep_running(name: str, work: Callable[[], Awaitable[None]], restart_s: float = RESTART_S) -> None:
    """Run `work`, which never ends by itself, until cancelled. One that fails is logged and begun again."""
    while True:
        try:
            await work()
        except Exception:
            logger.exception("%s failed; it is begun again in %g s", name, restart_s)
        await asyncio.sleep(restart_s)
