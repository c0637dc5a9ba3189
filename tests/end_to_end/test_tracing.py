"""One trace from a client's span through gateway, prefill, transfer and decode, over HTTP and gRPC."""

import asyncio
import json
import random
import secrets
import sys
import time
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from tandem.testing import LocalCluster
from tests.end_to_end.clients import make_request
from tests.end_to_end.spans import Collector, Span

pytestmark = pytest.mark.asyncio(loop_scope="module")
STAGES = {"prepare", "queue", "prefill", "grant_wait", "transfer", "decode_queue", "first_step", "decode"}
PREFILL = {"prefill.queue", "prefill.compute", "prefill.send"}
DECODE = {"decode.reserve", "decode.receive", "decode.run"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def collector() -> AsyncIterator[Collector]:
    async with Collector() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(start_cluster, collector) -> AsyncIterator[LocalCluster]:
    async with start_cluster(environment=collector.environment) as running:
        yield running


def prompt_of(length: int) -> list[int]:
    return [random.randrange(256) for _ in range(length)]


def new_parent(flags: str = "01") -> tuple[str, str]:
    """A client's span: its trace, and the header that names it."""
    trace = secrets.token_hex(16)
    return trace, f"00-{trace}-{secrets.token_hex(8)}-{flags}"


async def trace_of(collector: Collector, trace: str, num_spans: int) -> list[Span]:
    async with asyncio.timeout(20):
        while len(found := collector.by_trace().get(trace, [])) < num_spans:
            await asyncio.sleep(0.1)
    return found


async def test_a_stream_over_grpc_is_one_trace_under_the_clients_span(cluster, collector, connect):
    trace, parent = new_parent()
    async with connect(cluster) as client:
        call = client.stub.GenerateStream(
            make_request(prompt_of(100), 8, ignore_eos=True), metadata=(("traceparent", parent),)
        )
        chunks = [chunk async for chunk in call]
    spans = await trace_of(collector, trace, 15)
    by_name = {span.name: span for span in spans}
    assert set(by_name) == {"request"} | STAGES | PREFILL | DECODE
    request = by_name["request"]
    assert request.parent == parent.split("-")[2]
    assert {span.parent for span in spans} == {request.id, request.parent}
    services = {name: by_name[name].service for name in by_name}
    assert {services[name] for name in PREFILL} == {"tandem-prefill"}
    assert {services[name] for name in DECODE} == {"tandem-decode"}
    assert request.attributes["tandem.request_id"] == chunks[-1].request_id
    assert request.attributes["tandem.outcome"] == "length"
    assert request.attributes["tandem.num_output_tokens"] == 8
    assert by_name["decode.run"].attributes["tandem.num_tokens"] == 8
    sent, received = by_name["prefill.send"].attributes, by_name["decode.receive"].attributes
    assert sent["tandem.num_bytes"] == received["tandem.num_bytes"] == chunks[-1].choice.timing.kv_bytes > 0
    assert not any(span.is_error for span in spans)


async def test_a_request_over_http_is_one_too_and_an_unsampled_one_is_none(cluster, collector):
    (trace, parent), (unsampled, other) = new_parent(), new_parent("00")
    body = {"model": "test", "prompt": "abc", "max_tokens": 4}
    async with httpx.AsyncClient(base_url=cluster.http) as http:
        await http.post("/v1/completions", json=body, headers={"traceparent": other})
        await http.post("/v1/completions", json={**body, "stream": True}, headers={"traceparent": parent})
    spans = await trace_of(collector, trace, 15)
    assert {span.name for span in spans} == {"request"} | STAGES | PREFILL | DECODE
    assert unsampled not in collector.by_trace()


async def test_a_header_that_names_no_span_begins_a_trace_of_its_own(cluster, collector):
    body = {"model": "test", "prompt": "abc", "max_tokens": 2}
    async with httpx.AsyncClient(base_url=cluster.http) as http:
        headers = {"traceparent": "not a span", "x-request-id": "mine"}
        await http.post("/v1/completions", json=body, headers=headers)
    async with asyncio.timeout(20):
        while not (
            found := [s for s in collector.named("request") if s.attributes.get("tandem.client_request_id")]
        ):
            await asyncio.sleep(0.1)
    assert found[-1].attributes["tandem.client_request_id"] == "mine"
    assert found[-1].parent == ""


async def test_choices_are_parts_of_one_request(cluster, collector, connect):
    trace, parent = new_parent()
    async with connect(cluster) as client:
        request = make_request(prompt_of(60), 4, n=2, ignore_eos=True, temperature=1.0)
        await client.stub.Generate(request, metadata=(("traceparent", parent),))
    spans = await trace_of(collector, trace, 1 + 2 * 14)
    choices = {span.attributes["tandem.choice"] for span in spans if span.name in STAGES}
    assert choices == {0, 1}
    assert len([span for span in spans if span.name == "decode.run"]) == 2


async def test_a_refused_request_has_a_span_that_says_why(cluster, collector):
    trace, parent = new_parent()
    async with httpx.AsyncClient(base_url=cluster.http) as http:
        body = {"model": "nobody", "prompt": "abc"}
        await http.post("/v1/completions", json=body, headers={"traceparent": parent})
    (span,) = await trace_of(collector, trace, 1)
    assert span.is_error
    assert span.attributes["tandem.outcome"] == "model_not_found"


async def test_the_python_client_opens_the_first_span_where_opentelemetry_is_set_up(cluster, collector):
    """In a process of its own: a provider is for good."""
    program = f"""
import asyncio
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint={collector.url!r})))
trace.set_tracer_provider(provider)
from tandem.client import Client, Sampling
with Client({cluster.grpc!r}) as client:
    client.generate([1, 2, 3], Sampling(max_tokens=3, temperature=0.0))
provider.shutdown()
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    assert await process.wait() == 0
    async with asyncio.timeout(20):
        while not (found := collector.named("tandem.stream")):
            await asyncio.sleep(0.1)
    spans = await trace_of(collector, found[0].trace, 10)
    request = next(span for span in spans if span.name == "request")
    assert request.parent == found[0].id


async def test_a_retry_is_told_and_a_failed_transfer_is_an_error(start_cluster, connect, collector):
    faults = {"TANDEM_FAULTS": json.dumps({"corrupts": True, "every": 2})}
    trace, parent = new_parent()
    async with (
        start_cluster(environment={**collector.environment, **faults}) as cluster,
        connect(cluster) as client,
    ):
        request = make_request(prompt_of(150), 6, ignore_eos=True)
        call = client.stub.GenerateStream(request, metadata=(("traceparent", parent),))
        assert [chunk async for chunk in call][-1].choice.timing.num_attempts == 2
        for name in ("gateway", "prefill-0", "decode-0"):
            assert await cluster.processes[name].stop() == 0, "what is left is sent at the end"
    spans = collector.by_trace()[trace]
    request = next(span for span in spans if span.name == "request")
    assert request.attributes["tandem.causes"] == "transfer_failed"
    assert {span.attributes["tandem.attempt"] for span in spans if "tandem.attempt" in span.attributes} == {
        1,
        2,
    }
    assert any(span.is_error for span in spans if span.name == "decode.receive")


async def test_a_collector_that_is_not_there_costs_requests_nothing(start_cluster, connect, oracle):
    nowhere = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_BSP_SCHEDULE_DELAY": "100"}
    async with start_cluster(environment=nowhere) as cluster, connect(cluster) as client:
        for length in (20, 40):
            answer = await client.generate(list(range(length)), 8)
            assert answer.token_ids == oracle(list(range(length)), max_tokens=8)
        began_s = time.monotonic()
        assert await cluster.processes["gateway"].stop() == 0
        assert time.monotonic() - began_s < 30


async def test_without_a_collector_nothing_that_makes_spans_is_even_imported():
    """redis-py imports the SDK's metrics by itself where it finds them."""
    code = """
import asyncio, sys
import gateway.main, prefill_service.main, decode_service.main, tandem.client
from cluster.tracing import NO_TRACING, start_tracing
assert start_tracing(None, "s", "i") is start_tracing("", "s", "i") is NO_TRACING
found = [name for name in sys.modules if name.startswith(("opentelemetry.sdk.trace", "opentelemetry.exporter"))]
sys.exit(bool(found) or "cluster.otel" in sys.modules)
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0
