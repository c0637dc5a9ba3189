"""The gRPC front: `tandem.v1.Tandem` with health and reflection. Everything beyond the protocol is in `serving`."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.tracing import HEADER
from core.errors import (
    Busy,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    StreamNotFound,
    TandemError,
    Unauthenticated,
    Unavailable,
)
from gateway.answer import Answer
from gateway.ask import Arrival, Ask
from gateway.front.body_parser import BodyParser
from gateway.front.grpc_schema import read_message
from gateway.front.openai_objects import MAX_MESSAGE_LEN
from gateway.front.readers import Asked
from gateway.front.rendering import rendered
from gateway.front.resumable import ResumableStreams
from gateway.serving import Serving
from gateway.text.tool_calls import joined_calls
from gateway.text_generation import EchoedPrompt, TextChunk
from proto import client_pb2 as pb
from proto import convert

HealthServicer = Any  # grpc_health has no types
Behaviour = Callable[[bytes, Any], Awaitable[Any]]
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
MAX_SCORES = 4096
"""Of a prompt's tokens in one message of a stream."""
_STATUS = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    ModelNotFound: grpc.StatusCode.NOT_FOUND,
    StreamNotFound: grpc.StatusCode.NOT_FOUND,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    Busy: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Cancelled: grpc.StatusCode.CANCELLED,
}


class GrpcFront:
    """The handlers, each told which tenant calls. Requests come as bytes: those to generate may take long to look at,
    and what is none is a mistake of the client's."""

    def __init__(self, serving: Serving, bodies: BodyParser, stall_limit_s: float) -> None:
        self._serving = serving
        self._bodies = bodies
        self._stall_limit_s = stall_limit_s
        self._held: ResumableStreams[pb.GenerateChunk] = ResumableStreams()

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        return {
            "Generate": _handler(self._keyed(self.Generate)),
            "GenerateStream": _handler(self._keyed(self.GenerateStream), is_stream=True),
            "ResumeStream": _handler(self._keyed(self.ResumeStream), is_stream=True),
            "AbortRequest": _handler(self._keyed(self.AbortRequest)),
            "GetModel": _handler(self._keyed(self.GetModel)),
        }

    def _keyed(self, behaviour: Callable[[bytes, Any, str], Awaitable[Any]]) -> Behaviour:
        """`behaviour`, for calls with a key only, told whose it is."""

        async def keyed(request: bytes, context: Any) -> Any:
            try:
                tenant = self._serving.tenant(_metadata(context).get("authorization", ""))
            except TandemError as error:
                await _abort(context, error)
            return await behaviour(request, context, tenant)

        return keyed

    async def Generate(self, request: bytes, context: Any, tenant: str) -> pb.GenerateResponse:
        arrival = _arrival(context, tenant)
        try:
            ask = (await self._parse(request, is_stream=False)).ask
            answer = await self._serving.prepare(ask, arrival)
            response = pb.GenerateResponse(request_id=answer.request_id)
            for chunks in await answer.whole():
                response.choices.append(await _told(answer, ask, chunks))
                if response.ByteSize() > MAX_MESSAGE_BYTES:
                    break
        except TandemError as error:
            await _abort(context, error)
        response.usage.CopyFrom(_usage(answer))
        if response.ByteSize() > MAX_MESSAGE_BYTES:
            message = f"the answer is larger than {MAX_MESSAGE_BYTES} bytes; GenerateStream has no such limit"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        return response

    async def GenerateStream(self, request: bytes, context: Any, tenant: str) -> None:
        arrival = _arrival(context, tenant)
        try:
            asked = await self._parse(request, is_stream=True)
            ask = asked.ask
            answer = await self._serving.prepare(ask, arrival)
            make_messages = partial(_messages, answer, ask)
            is_held = asked.is_resumable
            await self._send(context, self._held.hold(make_messages, tenant) if is_held else make_messages())
        except TandemError as error:
            await _abort(context, error)

    async def ResumeStream(self, request: bytes, context: Any, tenant: str) -> None:
        try:
            asked = read_message(pb.ResumeStreamRequest, request)
            await self._send(context, self._held.resume(asked.resume_token, asked.offset, tenant))
        except TandemError as error:
            await _abort(context, error)

    async def _parse(self, request: bytes, is_stream: bool) -> Asked:
        """Raises InvalidRequest or Busy, also for a stream that cannot be held; counted."""
        try:
            asked: Asked = await self._bodies.parse(
                "generate", request, model_id=self._serving.model_id, is_stream=is_stream
            )
            if asked.is_resumable:
                self._held.check_room()
        except TandemError as error:
            self._serving.refused(error)
            raise
        return asked

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

    async def AbortRequest(self, request: bytes, context: Any, tenant: str) -> pb.AbortRequestResponse:
        try:
            asked = read_message(pb.AbortRequestRequest, request)
        except TandemError as error:
            await _abort(context, error)
        was_running = self._serving.orchestrator.abort(asked.request_id, tenant)
        return pb.AbortRequestResponse(was_running=was_running)

    async def GetModel(self, request: bytes, context: Any, tenant: str) -> pb.GetModelResponse:
        try:
            read_message(pb.GetModelRequest, request)
            context_len = self._serving.context_len
        except TandemError as error:
            await _abort(context, error)
        return pb.GetModelResponse(
            model=self._serving.model_id,
            fingerprint=self._serving.fleet.fingerprint,
            context_len=context_len,
            vocab_size=self._serving.vocab_size,
        )


def _arrival(context: Any, tenant: str) -> Arrival:
    """Now."""
    trace_parent = _metadata(context).get(HEADER, "")
    return Arrival(allowed_s=context.time_remaining(), trace_parent=trace_parent, tenant=tenant)


def _metadata(context: Any) -> dict[str, str]:
    return dict(context.invocation_metadata() or ())


async def _messages(
    answer: Answer, ask: Ask, resume_token: str = ""
) -> AsyncGenerator[pb.GenerateChunk, None]:
    """Closing it early aborts the request."""
    if resume_token:
        yield pb.GenerateChunk(request_id=answer.request_id, resume_token=resume_token)
    num_open = ask.num_choices
    async with contextlib.aclosing(answer.chunks()) as chunks:
        async for chunk in chunks:
            choice = await _told(answer, ask, [chunk])
            for part in _first_scores(choice):
                yield pb.GenerateChunk(request_id=answer.request_id, choice=part)
            num_open -= bool(chunk.finish_reason)
            usage = None if num_open else _usage(answer)
            yield pb.GenerateChunk(request_id=answer.request_id, choice=choice, usage=usage)


def _first_scores(choice: pb.Choice) -> Iterator[pb.Choice]:
    """Those of a prompt's scores that are too many for one message, taken out of `choice`."""
    while len(choice.prompt_logprobs) > MAX_SCORES:
        yield pb.Choice(index=choice.index, prompt_logprobs=choice.prompt_logprobs[:MAX_SCORES])
        del choice.prompt_logprobs[:MAX_SCORES]


async def _told(answer: Answer, ask: Ask, chunks: Sequence[TextChunk]) -> pb.Choice:
    choice = await rendered(partial(_choice, ask, chunks), chunks)
    if choice.finish_reason:
        choice.timing.CopyFrom(pb.Timing(**asdict(answer.timing(choice.index))))
    return choice


def _choice(ask: Ask, chunks: Sequence[TextChunk]) -> pb.Choice:
    first, last = chunks[0], chunks[-1]
    tokens = [token for chunk in chunks for token in chunk.tokens]
    calls = joined_calls(call for chunk in chunks for call in chunk.calls)
    echoed = first.prompt.text if first.prompt is not None else ""
    choice = pb.Choice(
        index=first.choice,
        text=echoed + "".join(chunk.text for chunk in chunks),
        token_ids=[token.token_id for token in tokens],
        finish_reason=convert.FINISH_REASONS[last.finish_reason],
        tool_calls=[
            pb.ToolCall(index=call.index, id=call.call_id, name=call.name, arguments=call.arguments)
            for call in calls
        ],
    )
    if isinstance(last.stop_reason, str):
        choice.stop_string = last.stop_reason
    elif last.stop_reason is not None:
        choice.stop_token_id = last.stop_reason
    if ask.wants_logprobs:
        choice.logprobs.extend(
            pb.TokenLogprob(
                token_id=token.token_id, logprob=token.logprob, top=convert.top_to_proto(token.top)
            )
            for token in tokens
        )
    if first.prompt is not None and first.prompt.scores:
        choice.prompt_logprobs.extend(_prompt_logprobs(first.prompt))
    return choice


def _prompt_logprobs(prompt: EchoedPrompt) -> Iterator[pb.TokenLogprob]:
    first, *rest = prompt.token_ids
    yield pb.TokenLogprob(token_id=first)
    for token_id, score in zip(rest, prompt.scores, strict=True):
        yield pb.TokenLogprob(
            token_id=token_id, logprob=score.logprob, rank=score.rank, top=convert.top_to_proto(score.top)
        )


def _usage(answer: Answer) -> pb.Usage:
    return pb.Usage(**asdict(answer.usage))


async def _abort(context: Any, error: TandemError) -> NoReturn:
    """End the call with the status of `error`; code and field travel as trailing metadata."""
    status = _STATUS.get(
        type(error), grpc.StatusCode.UNAVAILABLE if error.retryable else grpc.StatusCode.INTERNAL
    )
    field = error.field if isinstance(error, InvalidRequest | ModelNotFound) else ""
    details = (f"{field}: {error}" if field else str(error))[:MAX_MESSAGE_LEN]
    metadata = [("tandem-code", error.code.value), ("tandem-field", field)]
    if isinstance(error, Busy):
        metadata.append(("tandem-retry-after-s", f"{error.retry_after_s:g}"))
    await context.abort(status, details, tuple(metadata))
    raise AssertionError("abort() raises")


def _handler(behaviour: Behaviour, is_stream: bool = False) -> grpc.RpcMethodHandler:
    make = grpc.unary_stream_rpc_method_handler if is_stream else grpc.unary_unary_rpc_method_handler
    return make(behaviour, response_serializer=lambda message: message.SerializeToString())


def create_server(
    serving: Serving, bodies: BodyParser, stall_limit_s: float
) -> tuple[grpc.aio.Server, HealthServicer]:
    """The server with all its services, not bound or started yet. A stream whose client takes nothing for
    `stall_limit_s` ends."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    name = pb.DESCRIPTOR.services_by_name["Tandem"].full_name
    handlers = GrpcFront(serving, bodies, stall_limit_s).handlers()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    names = (name, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return server, healthy


async def set_serving(healthy: HealthServicer, is_serving: bool) -> None:
    status = (
        health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
    )
    await healthy.set("", status)
