"""What operators look at, as `/cluster` tells it: the workers with their load, what runs, what ended, how fast. Lists
are bounded whatever runs, and hold ids, lengths and times, never text. Reads everything, changes nothing."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import msgspec

from core.clock import Clock, loop_time
from core.handoff import HandoffState
from core.load import Load
from core.worker import WorkerRecord
from gateway.rates import Flow, History, Latencies, PerSecond
from gateway.recent import EndedRequest, shown_id
from gateway.routing.fleet import Fleet, Gone
from gateway.routing.link import WorkerLink
from gateway.routing.live import Live
from gateway.serving import Serving

MAX_SHOWN = 128
MAX_GONE_S = 600.0
MAX_REASON_LEN = 200
RETRY = "retry"


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker that is registered, or whose session is open. `silent_s` says how long nothing was heard of it; None
    without a session."""

    record: WorkerRecord
    load: Load
    is_up: bool
    num_open: int
    silent_s: float | None


@dataclass(frozen=True, slots=True)
class GoneView:
    """A worker that left, and whose id nobody has taken."""

    worker_id: str
    role: str
    num_blocks: int
    ago_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class RequestView:
    """One running choice. `stage` is that which it is in, or "retry" while another attempt catches up; `stages` are
    the seconds of each so far."""

    request_id: str
    client_request_id: str
    state: HandoffState
    stage: str
    age_s: float
    prefill_worker_id: str
    decode_worker_id: str
    connector: str
    num_kv_bytes: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    num_attempts: int
    num_preemptions: int
    causes: list[str]
    stages: dict[str, float]


@dataclass(frozen=True, slots=True)
class Overview:
    """`now_s` is on the clock of the gateway of that id, which has another one after each start. `requests` are the
    oldest that run; `num_requests` and `num_by_stage` count all. `recent` are the newest that ended."""

    model: str
    grpc: str
    gateway_id: str
    now_s: float
    workers: list[WorkerView]
    gone: list[GoneView]
    num_requests: int
    num_by_stage: dict[str, int]
    requests: list[RequestView]
    recent: list[EndedRequest]
    per_second: PerSecond
    latencies: Latencies
    flows: list[Flow]
    history: History


def overview(serving: Serving, after: int = 0, clock: Clock = loop_time) -> Overview:
    """Of what ended, only what did after the request of that number: a page has seen those before."""
    live, rates = serving.orchestrator.live, serving.orchestrator.recent.rates
    return Overview(
        serving.model_id,
        serving.grpc_address,
        serving.fleet.gateway_id,
        clock(),
        [_worker(link, clock()) for link in serving.fleet.links],
        _gone(serving.fleet, clock()),
        len(live),
        dict(Counter(_stage(one) for one in live.values())),
        [_request(one) for one in islice(live.values(), MAX_SHOWN)],
        serving.orchestrator.recent.after(after),
        rates.per_second(),
        rates.latencies(),
        rates.flows(),
        rates.history(),
    )


def to_json(view: Overview) -> bytes:
    return msgspec.json.encode(view)


def _worker(link: WorkerLink, now_s: float) -> WorkerView:
    silent_s = now_s - link.heard_s if link.is_up and link.heard_s is not None else None
    return WorkerView(link.record, link.load, link.is_up, link.num_open, silent_s)


def _gone(fleet: Fleet, now_s: float) -> list[GoneView]:
    """The latest of each id that nobody has now."""
    there = {link.record.worker_id for link in fleet.links}
    latest = {gone.record.worker_id: gone for gone in _lately(fleet.gone, now_s)}
    return [
        GoneView(
            name, gone.record.role, gone.record.num_blocks, now_s - gone.at_s, gone.reason[:MAX_REASON_LEN]
        )
        for name, gone in latest.items()
        if name not in there
    ]


def _lately(gone: Iterable[Gone], now_s: float) -> list[Gone]:
    return [one for one in gone if now_s - one.at_s < MAX_GONE_S]


def _stage(live: Live) -> str:
    is_behind = live.report.num_attempts > 1 and live.report.state is not HandoffState.DECODING
    return RETRY if is_behind else live.clock.stage


def _request(live: Live) -> RequestView:
    request, report = live.request, live.report
    stages = live.clock.so_far()
    return RequestView(
        request.request_id,
        shown_id(request.client_request_id),
        report.state,
        _stage(live),
        stages["total_s"],
        report.prefill_worker_id,
        report.decode_worker_id,
        report.connector,
        report.num_kv_bytes,
        len(request.prompt_ids),
        report.num_cached_tokens,
        report.num_tokens,
        report.num_attempts,
        report.num_preemptions,
        list(report.causes),
        stages,
    )
