"""Log lines as text or as JSON, one a line. A line that concerns a request has its id, as its caller or the task that
serves the request names it, and its tenant if that task knows one; `fields` are more that a machine may want.

    2026-11-30 12:00:00,000 INFO gateway.answer: request ended request_id=5f0c... outcome=stop total_s=0.81
    {"time": "2026-11-30T12:00:00.000+00:00", "level": "INFO", "service": "gateway", "logger": ..., "message": ...}
"""

import json
import logging
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from core.ids import HandoffId

FORMATS = ("text", "json")
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_request_id: ContextVar[str] = ContextVar("request_id", default="")
_tenant: ContextVar[str] = ContextVar("tenant", default="")


@dataclass(frozen=True, slots=True)
class LogForm:
    """How a process writes its log; JSON lines say whose they are."""

    format: str = "text"
    service: str = ""


def set_up_logs(form: LogForm) -> None:
    """Everything from INFO on, to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(form.service) if form.format == "json" else TextFormatter(TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def serve_request(request_id: str, tenant: str = "") -> None:
    """Lines of this task, and of those that it starts from now on, concern that request, of that tenant if any."""
    _request_id.set(request_id)
    _tenant.set(tenant)


def about(request_id: str, **fields: Any) -> dict[str, Any]:
    """For a logging call's `extra`."""
    return {"request_id": request_id, "fields": fields}


def about_handoff(handoff_id: HandoffId) -> dict[str, Any]:
    return about(handoff_id.request_id, attempt=handoff_id.attempt)


def told(record: logging.LogRecord) -> dict[str, Any]:
    """What a line says beside its message."""
    whose = {"request_id": getattr(record, "request_id", "") or _request_id.get(), "tenant": _tenant.get()}
    return {**{name: value for name, value in whose.items() if value}, **getattr(record, "fields", {})}


class TextFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        return " ".join((super().formatMessage(record), *(f"{k}={v}" for k, v in told(record).items())))


class JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **told(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
