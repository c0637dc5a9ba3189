"""Whether a request would be served in time, predicted before any work is done for it. Pure decisions over what is
known now: no I/O, no torch; takes a clock. The workers enforce every bound themselves; this only spares everybody
the wait.

    prefill  tokens queued at the worker that is free first, over its measured rate      ┐ longer than
    decode   requests beyond the batch places and blocks there are, over ends a second   ┘ max_queue_s: Busy
"""

import math
from collections import OrderedDict, deque
from collections.abc import Mapping

import numpy as np

from core.clock import Clock, loop_time
from core.errors import Busy
from core.ids import RequestId
from gateway.routing.worker_table import WorkerTable

WINDOW_S = 10.0
MIN_SPAN_S = 1.0
ARRIVAL_S = 1.0
MAX_RETRY_AFTER_S = 60.0


class EndRate:
    """Ends a second over the last WINDOW_S."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends_s: deque[float] = deque()

    def note(self) -> None:
        self._ends_s.append(self._clock())

    @property
    def per_s(self) -> float:
        """0 while nothing is known; the first ends after a pause say nothing yet: the others of a burst follow."""
        now_s = self._clock()
        while self._ends_s and self._ends_s[0] <= now_s - WINDOW_S:
            self._ends_s.popleft()
        span_s = now_s - self._ends_s[0] if self._ends_s else 0.0
        return len(self._ends_s) / span_s if span_s >= MIN_SPAN_S else 0.0


class Admission:
    """One per gateway. A request is *arriving* from its admission until its tokens are asked for: the workers' queues
    do not show it yet, so it is counted here, for ARRIVAL_S at most."""

    def __init__(self, max_queue_s: float, clock: Clock = loop_time) -> None:
        self._max_queue_s = max_queue_s
        self._clock = clock
        self._ends = EndRate(clock)
        self._arriving: OrderedDict[RequestId, tuple[float, int]] = OrderedDict()

    def check(
        self,
        prefill: WorkerTable,
        decode: WorkerTable,
        num_tokens: int,
        num_waiting_blocks: int,
        num_live: int,
    ) -> None:
        """Raises Busy, with the time after which it would be admitted, when a prompt of `num_tokens` would wait for
        longer than max_queue_s in either tier. `num_waiting_blocks` is what those of the `num_live` requests want
        that have no decode blocks yet."""
        self._expire()
        for tier, wait_s in (
            ("prefill", self.prefill_wait_s(prefill, decode)),
            ("decode", self.decode_wait_s(decode, num_tokens, num_waiting_blocks, num_live)),
        ):
            if wait_s > self._max_queue_s:
                message = f"the {tier} tier is behind by {wait_s:.1f} s, more than {self._max_queue_s:g} s"
                raise Busy(
                    message, max(1.0, math.ceil(min(wait_s - self._max_queue_s, MAX_RETRY_AFTER_S))), tier
                )

    def arriving(self, request_id: RequestId, num_tokens: int) -> None:
        """It was admitted."""
        self._arriving[request_id] = self._clock() + ARRIVAL_S, num_tokens

    def arrived(self, request_id: RequestId) -> None:
        """It counts as live from now on."""
        self._arriving.pop(request_id, None)

    def ended(self) -> None:
        """A request is over, whatever ended it: its place and blocks are free."""
        self._ends.note()

    def prefill_wait_s(self, prefill: WorkerTable, decode: WorkerTable) -> float:
        """Until the worker that is free first has computed what is queued; 0 while no rate is known. Without a
        prefill tier those count that compute any prompt themselves."""
        wait_s = self._shortest_queue_s(prefill, prefill.column("is_open") > 0)
        if wait_s is None:
            is_colocated = (decode.column("is_open") > 0) & (decode.column("is_colocated") > 0)
            wait_s = self._shortest_queue_s(decode, is_colocated)
        return wait_s or 0.0

    def _shortest_queue_s(self, table: WorkerTable, of: np.ndarray) -> float | None:
        num_workers = int(of.sum())
        if not num_workers:
            return None
        arriving = sum(num_tokens for _, num_tokens in self._arriving.values()) / num_workers
        rate = table.column("tokens_per_s")
        wait_s = (table.column("ahead") + arriving) * (rate > 0) / np.maximum(rate, 1e-9)
        wait_s[~of] = np.inf
        return float(wait_s.min())

    def decode_wait_s(
        self, table: WorkerTable, num_tokens: int, num_waiting_blocks: int, num_live: int
    ) -> float:
        """Until as many requests have ended as this one is beyond what the tier holds at a time. While no rate is
        known the whole tier may be filled a second time."""
        totals = table.totals()
        num_places = totals["max_batch"]
        if not num_places:
            return 0.0
        num_ahead = max(num_live, totals["published"]) - totals["suspended"]
        num_ahead += len(self._arriving) + 1 - num_places
        num_waiting_blocks += -(-(num_tokens + 1) // table.block_size)
        num_ahead = max(num_ahead, _short_of_blocks(totals, table.block_size, num_waiting_blocks))
        if num_ahead <= 0:
            return 0.0
        if per_s := self._ends.per_s:
            return num_ahead / per_s
        return 0.0 if num_ahead <= num_places else math.inf

    def _expire(self) -> None:
        now_s = self._clock()
        while self._arriving and next(iter(self._arriving.values()))[0] <= now_s:
            self._arriving.popitem(last=False)


def _short_of_blocks(totals: Mapping[str, int], block_size: int, needed: int) -> int:
    """How many of the running requests must end before there are so many blocks."""
    free, running = totals["free_blocks"] - totals["running"], totals["running"]
    if needed <= free or not running or not totals["told_blocks"]:
        return 0
    blocks_each = max((totals["pool_tokens"] // block_size - free) / running, 1.0)
    return math.ceil((needed - free) / blocks_each)
