"""Every error that crosses a boundary, in one tree. Each carries a stable code that the wire and HTTP use."""

from enum import StrEnum


class ErrorCode(StrEnum):
    """Why a request or handoff ended without its tokens. Values are what clients and metrics see."""

    INVALID = "invalid_request"
    MODEL_NOT_FOUND = "model_not_found"
    BUSY = "busy"
    UNAVAILABLE = "unavailable"
    STALE = "stale"
    DEADLINE = "deadline_exceeded"
    CANCELLED = "cancelled"
    TRANSFER = "transfer_failed"
    ENGINE = "engine_error"
    WORKER_LOST = "worker_lost"
    STREAM_NOT_FOUND = "stream_not_found"
    UNAUTHENTICATED = "invalid_api_key"


class TandemError(Exception):
    """The root. `retryable` says whether another attempt may succeed within the request's retry budget."""

    code = ErrorCode.ENGINE
    retryable = False


class InvalidRequest(TandemError):
    """A client's mistake. `field` names the parameter at fault, as the client spelled it."""

    code = ErrorCode.INVALID

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class ModelNotFound(TandemError):
    code = ErrorCode.MODEL_NOT_FOUND

    def __init__(self, model: str, message: str = "") -> None:
        super().__init__(message or f"the model `{model}` does not exist")
        self.field = "model"


class Busy(TandemError):
    """A bound was reached; nothing was done. `retry_after_s` is an estimate; `tier` is the one that is behind, if
    that is why."""

    code = ErrorCode.BUSY

    def __init__(self, message: str, retry_after_s: float = 1.0, tier: str = "") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.tier = tier


class Unavailable(TandemError):
    """No worker of a needed tier is known."""

    code = ErrorCode.UNAVAILABLE


class StaleEpoch(TandemError):
    """The message names an incarnation or attempt that is over; the present one may do better."""

    code = ErrorCode.STALE
    retryable = True


class DeadlineExceeded(TandemError):
    code = ErrorCode.DEADLINE


class Cancelled(TandemError):
    code = ErrorCode.CANCELLED


class TransferFailed(TandemError):
    """Blocks did not arrive whole: peer lost, bad digest, wrong chain hash, timeout."""

    code = ErrorCode.TRANSFER
    retryable = True


class ModelLoadError(TandemError):
    """The files do not make a model that can be run. The message names the file and what is wrong."""

    code = ErrorCode.ENGINE


class EngineFailed(TandemError):
    code = ErrorCode.ENGINE


class WorkerLost(TandemError):
    code = ErrorCode.WORKER_LOST
    retryable = True


class StreamNotFound(TandemError):
    """Nothing is held under that resume token: it never was, or nobody read it for too long."""

    code = ErrorCode.STREAM_NOT_FOUND


class Unauthenticated(TandemError):
    """The call has no API key, or one that nobody was given. The code is OpenAI's; messages never tell a key."""

    code = ErrorCode.UNAUTHENTICATED


_BY_CODE: dict[ErrorCode, type[TandemError]] = {
    ErrorCode.UNAVAILABLE: Unavailable,
    ErrorCode.STALE: StaleEpoch,
    ErrorCode.DEADLINE: DeadlineExceeded,
    ErrorCode.CANCELLED: Cancelled,
    ErrorCode.TRANSFER: TransferFailed,
    ErrorCode.ENGINE: EngineFailed,
    ErrorCode.WORKER_LOST: WorkerLost,
    ErrorCode.BUSY: Busy,
    ErrorCode.STREAM_NOT_FOUND: StreamNotFound,
    ErrorCode.UNAUTHENTICATED: Unauthenticated,
}


def error_from(code: str, message: str, field: str = "") -> TandemError:
    """The typed error for a code that arrived on a wire; an unknown code becomes EngineFailed."""
    if code == ErrorCode.INVALID:
        return InvalidRequest(field, message)
    if code == ErrorCode.MODEL_NOT_FOUND:
        return ModelNotFound("", message)
    return next((kind for known, kind in _BY_CODE.items() if known == code), EngineFailed)(message)
