"""The client's own span of a stream, in programs that have set up OpenTelemetry: the gateway's is its child. In
others nothing is imported and nothing done."""

import sys
from typing import Any


class ClientSpan:
    """From the first call to the end of the stream, whatever connections it takes. `metadata` goes with the call."""

    def __init__(self, request_id: str) -> None:
        self.metadata: tuple[tuple[str, str], ...] = ()
        self._span: Any = None
        if "opentelemetry.trace" in sys.modules:
            self._begin(request_id)

    def _begin(self, request_id: str) -> None:
        from opentelemetry import propagate, trace

        tracer = trace.get_tracer("tandem.client")
        attributes = {"tandem.client_request_id": request_id}
        self._span = tracer.start_span("tandem.stream", kind=trace.SpanKind.CLIENT, attributes=attributes)
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(self._span))
        self.metadata = tuple(carrier.items())

    def end(self, error: Exception | None = None) -> None:
        """Once counts."""
        span, self._span = self._span, None
        if span is None:
            return
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            span.set_status(Status(StatusCode.ERROR, str(error)))
        span.end()
