"""A collector of spans, as far as tests need one: OTLP over gRPC, everything kept."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

WAIT_S = 30.0


@dataclass(frozen=True)
class Span:
    """One span as it came; ids are hex, `parent` is empty at a root."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any] = field(default_factory=dict)
    is_error: bool = False

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """`async with Collector() as collector`: `spans` grows as they come to `url`. They are read when somebody looks,
    not while what is measured runs."""

    def __init__(self) -> None:
        self.url = ""
        self._messages: list[pb.ExportTraceServiceRequest] = []
        self._spans: list[Span] = []

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    @property
    def environment(self) -> dict[str, str]:
        """For processes whose spans are to come here soon."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.url, "OTEL_BSP_SCHEDULE_DELAY": "500"}

    async def Export(self, request: pb.ExportTraceServiceRequest, context: object) -> Any:
        self._messages.append(request)
        return pb.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Span]:
        messages, self._messages = self._messages, []
        for resource in (resource for message in messages for resource in message.resource_spans):
            service = _values(resource.resource.attributes)["service.name"]
            self._spans += [_span(service, span) for scope in resource.scope_spans for span in scope.spans]
        return self._spans

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    async def wait(self, count: int, *names: str) -> None:
        """Until there are as many spans of each name. Raises TimeoutError."""
        async with asyncio.timeout(WAIT_S):
            while any(len(self.named(name)) < count for name in names):
                await asyncio.sleep(0.1)

    def by_trace(self) -> dict[str, list[Span]]:
        found: dict[str, list[Span]] = defaultdict(list)
        for span in self.spans:
            found[span.trace].append(span)
        return found


def _span(service: str, span: Any) -> Span:
    return Span(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _values(span.attributes),
        span.status.code == 2,
    )


def _values(attributes: Iterable[Any]) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}
