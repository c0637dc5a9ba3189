"""The gRPC front: `tandem.v1.Tandem` with health and reflection. Everything beyond the protocol is in `serving`."""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator
from dataclasses import asdict
from functools import partial
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from core.errors import (
    Busy,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    StreamNotFound,
    TandemError,
    Unavailable,
)
from gateway.resumable import ResumableStreams
from gateway.serving import MAX_STOP_LEN, MAX_STOP_STRINGS, Ask, Prompt, Serving, TextChunk, TextGeneration
from proto import client_pb2 as pb
from proto import client_pb2_grpc, convert

HealthServicer = Any  # grpc_health has no types
MAX_MESSAGE_BYTES = 16 << 20
SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    # Clients may ping once a second, calls or not: gRPC's default ends their connection, and every stream on it, at
    # the third ping within minutes.
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
MAX_REQUEST_ID_LEN = 128
ROLES = ("system", "user", "assistant")
_STATUS = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    ModelNotFound: grpc.StatusCode.NOT_FOUND,
    StreamNotFound: grpc.StatusCode.NOT_FOUND,
    Busy: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Cancelled: grpc.StatusCode.CANCELLED,
}


class GrpcFront(client_pb2_grpc.TandemServicer):
    """The handlers."""

    def __init__(self, serving: Serving, stall_limit_s: float) -> None:
        self._serving = serving
        self._stall_limit_s = stall_limit_s
        self._held: ResumableStreams[pb.GenerateChunk] = ResumableStreams()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        try:
            generation = await self._serving.prepare(self._ask(request), context.time_remaining())
            chunks = [chunk async for chunk in generation.chunks()]
        except TandemError as error:
            await _abort(context, error)
        return pb.GenerateResponse(
            request_id=generation.request_id,
            text="".join(chunk.text for chunk in chunks),
            token_ids=[token_id for chunk in chunks for token_id in chunk.token_ids],
            finish_reason=convert.FINISH_REASONS[chunks[-1].finish_reason],
            usage=_usage(generation),
            timing=_timing(generation),
        )

    async def GenerateStream(self, request: pb.GenerateRequest, context: Any) -> None:
        try:
            if request.resumable:
                self._held.check_room()
            generation = await self._serving.prepare(self._ask(request), context.time_remaining())
            make_messages = partial(_messages, generation)
            await self._send(
                context, self._held.hold(make_messages) if request.resumable else make_messages()
            )
        except TandemError as error:
            await _abort(context, error)

    async def ResumeStream(self, request: pb.ResumeStreamRequest, context: Any) -> None:
        try:
            await self._send(context, self._held.resume(request.resume_token, request.offset))
        except TandemError as error:
            await _abort(context, error)

    async def _send(self, context: Any, messages: AsyncGenerator[pb.GenerateChunk, None]) -> None:
        async with contextlib.aclosing(messages):
            async for message in messages:
                await self._write(context, message)

    async def _write(self, context: Any, message: pb.GenerateChunk) -> None:
        """Returns when there is room for more. Raises DeadlineExceeded for a client that takes nothing: its stream
        would be kept for as long as its connection."""
        try:
            async with asyncio.timeout(self._stall_limit_s):
                await context.write(message)
        except TimeoutError:
            raise DeadlineExceeded(f"nothing was taken for {self._stall_limit_s:g} s") from None

    async def AbortRequest(self, request: pb.AbortRequestRequest, context: Any) -> pb.AbortRequestResponse:
        return pb.AbortRequestResponse(was_running=self._serving.orchestrator.abort(request.request_id))

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        try:
            context_len = self._serving.context_len
        except TandemError as error:
            await _abort(context, error)
        return pb.GetModelResponse(
            model=self._serving.model_id,
            fingerprint=self._serving.fleet.fingerprint,
            context_len=context_len,
            vocab_size=self._serving.vocab_size,
        )

    def _ask(self, request: pb.GenerateRequest) -> Ask:
        """Types are the message's own; ranges are checked here. Raises InvalidRequest."""
        _check_ranges(request)
        return Ask(
            model=request.model or self._serving.model_id,
            prompt=_prompt(request),
            max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
            temperature=request.temperature if request.HasField("temperature") else 1.0,
            top_p=request.top_p if request.HasField("top_p") else 1.0,
            top_k=request.top_k,
            seed=request.seed if request.HasField("seed") else None,
            stop=tuple(request.stop),
            stop_token_ids=tuple(request.stop_token_ids),
            ignore_eos=request.ignore_eos,
            client_request_id=request.client_request_id,
        )


def _prompt(request: pb.GenerateRequest) -> Prompt:
    match request.WhichOneof("input"):
        case "text":
            return Prompt("text", text=request.text)
        case "token_ids":
            return Prompt("token_ids", token_ids=tuple(request.token_ids.ids))
        case "chat":
            messages = tuple({"role": m.role, "content": m.content} for m in request.chat.messages)
            wrong = next((message["role"] for message in messages if message["role"] not in ROLES), None)
            if not messages:
                raise InvalidRequest("chat", "at least one message is needed")
            if wrong is not None:
                raise InvalidRequest("chat", f"role {wrong!r} is not one of {', '.join(ROLES)}")
            return Prompt("chat", messages=messages)
    raise InvalidRequest("input", "one of text, chat and token_ids is needed")


def _check_ranges(request: pb.GenerateRequest) -> None:
    checks = (
        ("max_tokens", not request.HasField("max_tokens") or request.max_tokens >= 1, "at least 1"),
        ("temperature", math.isfinite(request.temperature) and 0 <= request.temperature <= 2, "in [0, 2]"),
        ("top_p", not request.HasField("top_p") or 0 < request.top_p <= 1, "in (0, 1]"),
        ("stop", len(request.stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} strings"),
        (
            "stop",
            all(0 < len(stop) <= MAX_STOP_LEN for stop in request.stop),
            f"1 to {MAX_STOP_LEN} characters each",
        ),
        (
            "client_request_id",
            len(request.client_request_id) <= MAX_REQUEST_ID_LEN and _is_visible(request.client_request_id),
            f"at most {MAX_REQUEST_ID_LEN} visible ASCII characters",
        ),
    )
    for field, is_right, rule in checks:
        if not is_right:
            raise InvalidRequest(field, f"{field} must be {rule}")


def _is_visible(text: str) -> bool:
    return all("!" <= character <= "~" for character in text)


async def _messages(
    generation: TextGeneration, resume_token: str = ""
) -> AsyncGenerator[pb.GenerateChunk, None]:
    """Closing it early aborts the request."""
    if resume_token:
        yield pb.GenerateChunk(request_id=generation.request_id, resume_token=resume_token)
    async with contextlib.aclosing(generation.chunks()) as chunks:
        async for chunk in chunks:
            yield _chunk(generation, chunk)


def _chunk(generation: TextGeneration, chunk: TextChunk) -> pb.GenerateChunk:
    message = pb.GenerateChunk(
        request_id=generation.request_id,
        text=chunk.text,
        token_ids=chunk.token_ids,
        finish_reason=convert.FINISH_REASONS[chunk.finish_reason],
    )
    if chunk.finish_reason:
        message.usage.CopyFrom(_usage(generation))
        message.timing.CopyFrom(_timing(generation))
    return message


def _usage(generation: TextGeneration) -> pb.Usage:
    return pb.Usage(**asdict(generation.usage))


def _timing(generation: TextGeneration) -> pb.Timing:
    return pb.Timing(**asdict(generation.timing))


async def _abort(context: Any, error: TandemError) -> NoReturn:
    """End the call with the status of `error`; code and field travel as trailing metadata."""
    status = _STATUS.get(
        type(error), grpc.StatusCode.UNAVAILABLE if error.retryable else grpc.StatusCode.INTERNAL
    )
    field = error.field if isinstance(error, InvalidRequest | ModelNotFound) else ""
    details = f"{field}: {error}" if field else str(error)
    metadata = [("tandem-code", error.code.value), ("tandem-field", field)]
    if isinstance(error, Busy):
        metadata.append(("tandem-retry-after-s", f"{error.retry_after_s:g}"))
    await context.abort(status, details, tuple(metadata))
    raise AssertionError("abort() raises")


def create_server(serving: Serving, stall_limit_s: float) -> tuple[grpc.aio.Server, HealthServicer]:
    """The server with all its services, not bound or started yet. A stream whose client takes nothing for
    `stall_limit_s` ends."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    client_pb2_grpc.add_TandemServicer_to_server(GrpcFront(serving, stall_limit_s), server)
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    names = (pb.DESCRIPTOR.services_by_name["Tandem"].full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return server, healthy


async def set_serving(healthy: HealthServicer, is_serving: bool) -> None:
    status = (
        health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
    )
    await healthy.set("", status)
