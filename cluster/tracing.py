"""Spans of requests, where somebody wants them. Without `--otlp` everything here does nothing, and OpenTelemetry's
SDK for it is not even imported; with it, `cluster.otel` makes the spans.

    traceparent ─► gateway: request ──trace_parent──► prefill: queue, prefill, send
                     its stages     └────────────────► decode: reserve, receive, run
"""

from collections.abc import Mapping
from typing import Protocol

HEADER = "traceparent"
Attributes = Mapping[str, str | int | float]
NONE: Attributes = {}


class Span(Protocol):
    """One request's, in the process that serves it. Moments are of the event loop's clock."""

    @property
    def trace_parent(self) -> str:
        """Names it to others, in the form of the header traceparent; empty when nothing is traced."""
        ...

    def add(self, name: str, begin_s: float, end_s: float, attributes: Attributes = NONE) -> None:
        """A part of it that is over."""
        ...

    def end(self, end_s: float | None = None, attributes: Attributes = NONE, error: str = "") -> None: ...


class HandoffTrace(Protocol):
    """What a worker does for one handoff, as children of the gateway's span."""

    def begin(self, name: str) -> None: ...

    def end(self, name: str, attributes: Attributes = NONE) -> None:
        """Nothing, unless it was begun."""
        ...

    def close(self, error: str = "") -> None:
        """End what is left, which did not come to its own end."""
        ...


class Tracing(Protocol):
    """A process's spans."""

    def request(self, name: str, parent: str, begin_s: float) -> Span:
        """Under the client's span that `parent` names, if it names one."""
        ...

    def handoff(self, parent: str, attributes: Attributes) -> HandoffTrace:
        """Traced if `parent` names a span."""
        ...

    async def close(self) -> None:
        """Send what is left."""
        ...


class NoSpan:
    trace_parent = ""

    def add(self, name: str, begin_s: float, end_s: float, attributes: Attributes = NONE) -> None:
        pass

    def end(self, end_s: float | None = None, attributes: Attributes = NONE, error: str = "") -> None:
        pass


class NoHandoffTrace:
    def begin(self, name: str) -> None:
        pass

    def end(self, name: str, attributes: Attributes = NONE) -> None:
        pass

    def close(self, error: str = "") -> None:
        pass


NO_SPAN = NoSpan()
NO_HANDOFF_TRACE = NoHandoffTrace()


class NoTracing:
    def request(self, name: str, parent: str, begin_s: float) -> Span:
        return NO_SPAN

    def handoff(self, parent: str, attributes: Attributes) -> HandoffTrace:
        return NO_HANDOFF_TRACE

    async def close(self) -> None:
        pass


NO_TRACING = NoTracing()


def start_tracing(url: str | None, service: str, instance: str) -> Tracing:
    """Spans of `service` go to the OTLP collector (gRPC) at `url`, from a thread of its own. Without a URL there are
    none."""
    if not url:
        return NO_TRACING
    from cluster.otel import OtelTracing

    return OtelTracing.exporting_to(url, service, instance)
