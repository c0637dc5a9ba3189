"""What the gateway remembers of requests that ended, and what each adds to the rates as it runs. Lengths and ids, no
text; a constant cost for each request and each token."""

from collections import deque
from dataclasses import dataclass

from core.clock import Clock, loop_time
from core.ids import RequestId
from gateway.rates import Rates
from gateway.routing.live import Live
from gateway.timing import Mark, Timing

MAX_RECENT = 256
MAX_ID_LEN = 64


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """One choice that ended. `sequence` grows by one with each; `outcome` is its finish reason or an error's code;
    `ended_s` is on the gateway's clock."""

    sequence: int
    request_id: RequestId
    client_request_id: str
    outcome: str
    ended_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    timing: Timing


class Recent:
    """The last MAX_RECENT of them. `rates` count what runs as well."""

    def __init__(self, clock: Clock = loop_time) -> None:
        self.rates = Rates(clock)
        self._clock = clock
        self._num_ended = 0
        self._ring: deque[EndedRequest] = deque(maxlen=MAX_RECENT)

    def watch(self, live: Live) -> "Watch":
        """One that begins to run."""
        self.rates.now().num_arrived += 1
        return Watch(self, live)

    def after(self, sequence: int) -> list[EndedRequest]:
        """Those that ended after the one of that number, the newest first."""
        num_new = min(max(self._num_ended - sequence, 0), len(self._ring))
        return [self._ring[-1 - at] for at in range(num_new)]

    def add(self, live: Live, timing: Timing) -> None:
        self._num_ended += 1
        self.rates.now().num_ended += 1
        request, report = live.request, live.report
        ended = EndedRequest(
            self._num_ended,
            request.request_id,
            shown_id(request.client_request_id),
            report.outcome or "cancelled",
            self._clock(),
            len(request.prompt_ids),
            report.num_cached_tokens,
            report.num_tokens,
            timing,
        )
        self._ring.append(ended)


def shown_id(client_request_id: str) -> str:
    """A client's own id, which may be long."""
    return client_request_id[:MAX_ID_LEN]


class Watch:
    """One running choice, as its tokens go by."""

    __slots__ = ("_kv_bytes", "_live", "_recent", "_token_s")

    def __init__(self, recent: Recent, live: Live) -> None:
        self._recent = recent
        self._live = live
        self._token_s = 0.0
        self._kv_bytes = 0

    def token(self, finish_reason: str) -> None:
        """One that the client takes; the last one says why."""
        rates, report = self._recent.rates, self._live.report
        now_s, second = self._recent._clock(), rates.now()
        second.num_output_tokens += 1
        if report.num_tokens:
            second.gaps.add(now_s - self._token_s)
        else:
            second.first_tokens.add(self._live.clock.since(Mark.ARRIVED))
            if self._live.leader is None:  # a prompt counts once, whatever the number of its choices
                second.num_prompt_tokens += len(self._live.request.prompt_ids)
        self._token_s = now_s
        report.num_tokens += 1
        report.outcome = finish_reason
        if report.num_kv_bytes != self._kv_bytes:
            pair = (report.prefill_worker_id, report.decode_worker_id)
            rates.flow(pair, report.num_kv_bytes - self._kv_bytes)
            self._kv_bytes = report.num_kv_bytes
