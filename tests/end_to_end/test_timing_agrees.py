"""What is said of requests' time, in timing, metrics and spans, against the clients' own clock: 200 streams, sixteen
at a time, so that they queue, share batches and wait for grants.

The gateway's clock begins when a request has come and stops before its last chunk leaves; so the clients' say more by
the way there and back, and by what everybody waits for a core meanwhile. What that was is measured by a call that
does nothing, begun with each request. Beyond it the clocks agree within 3 %: in the sum over all requests, since what
holds a single one up is this machine's affair.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import pytest_asyncio

from gateway.timing import STAGES
from proto import client_pb2 as pb
from tests.end_to_end.clients import make_request
from tests.end_to_end.samples import Samples, grown, read_samples
from tests.end_to_end.spans import Collector

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.soak]
NUM_REQUESTS = 200
AT_ONCE = 16
WITHIN = 0.03
LETTERS = [ord(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]  # each token is text at once
WORKERS_SPANS = {
    "prefill.queue",
    "prefill.compute",
    "prefill.send",
    "decode.reserve",
    "decode.receive",
    "decode.run",
}


@dataclass(frozen=True)
class Seen:
    """What a client measured, also of a call that does nothing, begun with the request; and what it was told."""

    request_id: str
    first_s: float
    total_s: float
    nothing_s: float
    num_tokens: int
    timing: pb.Timing


@dataclass
class Run:
    """All of it; `metrics` is what the load added to each sample."""

    seen: list[Seen] = field(default_factory=list)
    metrics: Samples = field(default_factory=dict)
    collector: Collector = field(default_factory=Collector)

    def told(self, name: str) -> float:
        """The sum of one of timing's fields."""
        return sum(getattr(seen.timing, name) for seen in self.seen)

    def check(self, theirs_s: float, ours_s: float) -> None:
        """Two sums over all requests agree."""
        way_s = sum(seen.nothing_s for seen in self.seen)
        told = f"theirs {theirs_s:.3f} s, ours {ours_s:.3f} s, the way {way_s:.3f} s"
        assert abs(theirs_s - ours_s) <= WITHIN * theirs_s + way_s, told


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(start_cluster, connect) -> AsyncIterator[Run]:
    run = Run()
    arguments = ("--num-blocks", "2048")
    async with run.collector as collector:
        environment = collector.environment
        async with (
            start_cluster(worker_arguments=arguments, environment=environment) as cluster,
            connect(cluster) as client,
        ):
            await client.generate([1, 2, 3], 4)  # connections are made, code is loaded
            before = await read_samples(cluster)
            run.seen = await ask_all(client.stub)
            run.metrics = grown(before, await read_samples(cluster))
            await collector.wait(NUM_REQUESTS + 1, "request", *WORKERS_SPANS)
            yield run


async def ask_all(stub) -> list[Seen]:
    """The first ones one after another: the gRPC library takes a burst's calls one by one, before anybody's clock."""
    rng = random.Random(200)
    requests = [
        make_request(
            [index, *(rng.randrange(256) for _ in range(rng.randrange(1500, 1900)))],
            rng.randrange(16, 40),
            ignore_eos=True,
            allowed_token_ids=LETTERS,
        )
        for index in range(NUM_REQUESTS)
    ]

    async def ask_in_turn(start_s: float) -> list[Seen]:
        await asyncio.sleep(start_s)
        seen = []
        while requests:
            seen.append(await stream(stub, requests.pop()))
        return seen

    parts = await asyncio.gather(*(ask_in_turn(0.1 * index) for index in range(AT_ONCE)))
    return [seen for part in parts for seen in part]


async def stream(stub, request: pb.GenerateRequest) -> Seen:
    began_s = time.monotonic()
    first_s = total_s = 0.0
    num_tokens = 0
    call = stub.GenerateStream(request)
    nothing = asyncio.create_task(ask_nothing(stub))
    async for chunk in call:
        total_s = time.monotonic() - began_s
        first_s = first_s or total_s
        num_tokens += len(chunk.choice.token_ids)
    return Seen(chunk.request_id, first_s, total_s, await nothing, num_tokens, chunk.choice.timing)


async def ask_nothing(stub) -> float:
    began_s = time.monotonic()
    await stub.GetModel(pb.GetModelRequest())
    return time.monotonic() - began_s


async def test_the_clients_clock_says_the_same(run):
    for seen in run.seen:
        assert seen.timing.time_to_first_token_s <= seen.first_s
        assert seen.timing.total_s <= seen.total_s
    run.check(sum(seen.first_s for seen in run.seen), run.told("time_to_first_token_s"))
    run.check(sum(seen.total_s for seen in run.seen), run.told("total_s"))


async def test_the_stages_of_each_request_add_up_to_its_total(run):
    for seen in run.seen:
        stages = [getattr(seen.timing, stage) for stage in STAGES]
        assert min(stages) >= 0
        assert sum(stages) == pytest.approx(seen.timing.total_s, rel=1e-9)


async def test_the_metrics_are_the_sums_of_the_timings(run):
    expected = {
        "tandem_request_seconds": run.told("total_s"),
        "tandem_time_to_first_token_seconds": run.told("time_to_first_token_s"),
        'tandem_transfer_wait_seconds{connector="shm"}': run.told("transfer_s"),
        **{f'tandem_stage_seconds{{stage="{s.removesuffix("_s")}"}}': run.told(s) for s in STAGES},
    }
    for name, seconds in expected.items():
        base, _, labels = name.partition("{")
        suffix = f"{{{labels}" if labels else ""
        assert run.metrics[f"{base}_count{suffix}"] == NUM_REQUESTS, name
        assert run.metrics[f"{base}_sum{suffix}"] == pytest.approx(seconds, rel=1e-9), name


async def test_the_times_between_tokens_are_those_of_the_clients(run):
    num_gaps = sum(seen.num_tokens - 1 for seen in run.seen)
    assert run.metrics["tandem_inter_token_seconds_count"] == num_gaps
    ours_s = run.metrics["tandem_inter_token_seconds_sum"]
    run.check(sum(seen.total_s - seen.first_s for seen in run.seen), ours_s)


async def test_the_spans_are_the_timings_and_the_workers_are_under_them(run):
    requests = {span.attributes["tandem.request_id"]: span for span in run.collector.named("request")}
    traces = run.collector.by_trace()
    computed_s = 0.0
    for seen in run.seen:
        request = requests[seen.request_id]
        assert request.seconds == pytest.approx(seen.timing.total_s, abs=1e-6)
        parts = {span.name: span for span in traces[request.trace] if span is not request}
        assert {span.parent for span in parts.values()} == {request.id}
        for stage in STAGES:
            part = parts.pop(stage.removesuffix("_s"))
            assert part.seconds == pytest.approx(getattr(seen.timing, stage), abs=1e-6), stage
        assert set(parts) == WORKERS_SPANS
        computed_s += parts["prefill.compute"].seconds
    run.check(run.told("prefill_s"), computed_s)
