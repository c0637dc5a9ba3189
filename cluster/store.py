"""The connection to Redis, treated as a hint: every call has a time limit and may come back empty-handed.

A store that does not answer costs its caller at most the limit, and nothing at all while the breaker is open, which
takes a few failures in a row; that it opened and that Redis answers again is logged once each. redis-py drops the
connection of a cancelled command, so a late answer is never read by the next caller.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from prometheus_client import Counter, Histogram
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from cluster.keys import Keys
from core.clock import Clock, loop_time

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")

CALL_LIMIT_S = 1.0
FAILURES_TO_OPEN = 3
OPEN_S = 1.0
MAX_CALLS = 32
MAX_TOLD = 100

CALLS = Histogram("tandem_redis_call_seconds", "Time of calls to Redis that answered.", ["operation"])
FAILURES = Counter(
    "tandem_redis_failures", "Calls to Redis that failed or came too late.", ["operation", "reason"]
)


class Store:
    """One per process. `redis` is for scripts and tests; everything else goes through call()."""

    def __init__(self, url: str, cluster: str = "default", clock: Clock = loop_time) -> None:
        self.keys = Keys(cluster)
        self.redis: Any = Redis.from_url(url, socket_connect_timeout=CALL_LIMIT_S, retry=None)
        self.is_up = True
        self._clock = clock
        self._num_failures = 0
        self._open_until_s = 0.0
        self._told: set[str] = set()
        self._calls = asyncio.Semaphore(MAX_CALLS)

    async def call(
        self,
        make: Callable[[Any], Awaitable[Answer]],
        limit_s: float = CALL_LIMIT_S,
        operation: str = "other",
    ) -> Answer | None:
        """The answer of `make(redis)`, or None when there was none within `limit_s`, it was an error, or the breaker
        is open. At most MAX_CALLS have a connection at a time: redis-py refuses more than its pool has. `operation`
        is its name among the measurements."""
        if self._clock() < self._open_until_s:
            return None
        started_s = self._clock()
        try:
            async with _cancellable(), asyncio.timeout(limit_s), self._calls:
                answer = await make(self.redis)
        except ResponseError as error:
            self._refused(operation, error)
            return None
        except (RedisError, OSError, TimeoutError) as error:
            self._failed(operation, error)
            return None
        CALLS.labels(operation).observe(self._clock() - started_s)
        self._answered()
        return answer

    async def close(self) -> None:
        await self.redis.aclose()

    def _failed(self, operation: str, error: Exception) -> None:
        FAILURES.labels(operation, type(error).__name__).inc()
        self._num_failures += 1
        if self._num_failures < FAILURES_TO_OPEN:
            return
        self._open_until_s = self._clock() + OPEN_S
        if self.is_up:
            self.is_up = False
            reason = f"{type(error).__name__}: {error}"
            logger.warning("Redis does not answer (%s): serving on the last view of the cluster", reason)

    def _refused(self, operation: str, error: Exception) -> None:
        """Redis is there but does not take this call, or what stands in it is not what was expected: said once for
        each reason. redis-py puts the command, which differs each time, before the reason of a pipeline's error."""
        FAILURES.labels(operation, type(error).__name__).inc()
        self._answered()
        reason = str(error).rpartition("of pipeline caused error: ")[2]
        if reason not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(reason)
            logger.error("Redis refused a call: %s", reason)

    def _answered(self) -> None:
        self._num_failures = 0
        if not self.is_up:
            self.is_up = True
            logger.info("Redis answers again")


@contextlib.asynccontextmanager
async def _cancellable() -> AsyncIterator[None]:
    """Nobody's cancellation is lost in the block. redis-py sends through `asyncio.wait_for`, which on Python 3.11
    forgets a cancellation that comes together with the result: the caller would go on for a client that has left."""
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        yield
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError
