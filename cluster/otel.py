"""Spans made by OpenTelemetry's SDK and sent by its OTLP exporter. Imported only where something is traced; the SDK's
own variables (`OTEL_TRACES_SAMPLER`, `OTEL_RESOURCE_ATTRIBUTES`, ...) hold."""

import asyncio
import time

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cluster.tracing import HEADER, NO_HANDOFF_TRACE, NONE, Attributes, HandoffTrace
from core.clock import loop_time

_PROPAGATOR = TraceContextTextMapPropagator()
NS = 1_000_000_000


class OtelTracing:
    """Owns the provider: there is nothing global."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tandem")

    @classmethod
    def exporting_to(cls, url: str, service: str, instance: str) -> "OtelTracing":
        resource = Resource.create({"service.name": service, "service.instance.id": instance})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        return cls(provider)

    def request(self, name: str, parent: str, begin_s: float) -> "RequestSpan":
        return RequestSpan(self._tracer, name, _context(parent), begin_s)

    def handoff(self, parent: str, attributes: Attributes) -> HandoffTrace:
        if not parent:
            return NO_HANDOFF_TRACE
        return OtelHandoffTrace(self._tracer, _context(parent), attributes)

    async def close(self) -> None:
        await asyncio.to_thread(self._provider.shutdown)


class RequestSpan:
    """Its moments become times of day by one difference between the clocks, so durations stay what they were."""

    def __init__(self, tracer: Tracer, name: str, parent: Context, begin_s: float) -> None:
        self._tracer = tracer
        self._ahead_ns = time.time_ns() - round(loop_time() * NS)
        self._span = tracer.start_span(name, parent, SpanKind.SERVER, start_time=self._ns(begin_s))
        self.trace_parent = trace_parent_of(self._span)

    def add(self, name: str, begin_s: float, end_s: float, attributes: Attributes = NONE) -> None:
        context = set_span_in_context(self._span, Context())
        child = self._tracer.start_span(
            name, context, attributes=dict(attributes), start_time=self._ns(begin_s)
        )
        child.end(self._ns(end_s))

    def end(self, end_s: float | None = None, attributes: Attributes = NONE, error: str = "") -> None:
        self._span.set_attributes(dict(attributes))
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(None if end_s is None else self._ns(end_s))

    def _ns(self, moment_s: float) -> int:
        return round(moment_s * NS) + self._ahead_ns


class OtelHandoffTrace:
    def __init__(self, tracer: Tracer, parent: Context, attributes: Attributes) -> None:
        self._tracer = tracer
        self._parent = parent
        self._attributes = dict(attributes)
        self._open: dict[str, OtelSpan] = {}

    def begin(self, name: str) -> None:
        self._open[name] = self._tracer.start_span(name, self._parent, attributes=self._attributes)

    def end(self, name: str, attributes: Attributes = NONE) -> None:
        span = self._open.pop(name, None)
        if span is not None:
            span.set_attributes(dict(attributes))
            span.end()

    def close(self, error: str = "") -> None:
        for span in self._open.values():
            if error:
                span.set_status(Status(StatusCode.ERROR, error))
            span.end()
        self._open.clear()


def trace_parent_of(span: OtelSpan) -> str:
    """Its name for others."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
    return carrier.get(HEADER, "")


def _context(trace_parent: str) -> Context:
    """One without a span, where nobody names a valid one."""
    return _PROPAGATOR.extract({HEADER: trace_parent}, Context())
