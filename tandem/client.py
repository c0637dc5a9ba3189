"""The Python client of a running tandem, over gRPC: `AsyncClient`, and `Client` for code that blocks.

    with Client("127.0.0.1:50051") as client:
        for chunk in client.stream("The capital of France is", Sampling(max_tokens=8, temperature=0)):
            print(chunk.text, end="")

A stream whose connection breaks goes on where it was, over a new one, as long as the gateway holds it. A gateway with
API keys needs one: `api_key`, or the environment's TANDEM_API_KEY when that is None. Errors are
those of `core.errors`: InvalidRequest names the field at fault, Busy says when to come back, Unavailable is also what
an address without a gateway is.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Generator
from typing import Any, Self

import grpc

from proto import client_pb2 as pb
from proto import client_pb2_grpc
from tandem.api_key import authorization
from tandem.client_messages import (
    Answer,
    Choice,
    Chunk,
    Message,
    Model,
    Prompt,
    Sampling,
    StructuredOutputs,
    TokenLogprob,
    Usage,
    make_request,
    to_answer,
    to_error,
    to_model,
)
from tandem.client_stream import ResumedStream

__all__ = [
    "Answer",
    "AsyncClient",
    "Choice",
    "Chunk",
    "Client",
    "Message",
    "Model",
    "Prompt",
    "Sampling",
    "StructuredOutputs",
    "TokenLogprob",
    "Usage",
]

MAX_RESUMES = 12
ABORT_TIMEOUT_S = 2.0
CHANNEL_OPTIONS = (
    # A connection that died silently is found out.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Reconnecting waits no longer than a stream does before it is resumed.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
DEFAULTS = Sampling()


class AsyncClient:
    """For one event loop. `max_resumes` bounds how often a stream is resumed without anything new arriving."""

    def __init__(self, address: str, max_resumes: int = MAX_RESUMES, api_key: str | None = None) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub: Any = client_pb2_grpc.TandemStub(self._channel)
        self._max_resumes = max_resumes
        self._metadata = tuple(authorization(api_key).items())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends what still runs."""
        await self._channel.close()

    async def stream(
        self,
        prompt: Prompt,
        sampling: Sampling = DEFAULTS,
        *,
        deadline_s: float | None = None,
        request_id: str = "",
    ) -> AsyncGenerator[Chunk, None]:
        """Text, chat messages or token ids in; chunks out, of each choice exactly the last with a finish reason.
        Closing it early, or cancelling who reads it, aborts the request. `request_id` is for abort() and the
        gateway's log. Raises TandemError."""
        stream = _begin(prompt, sampling, deadline_s, request_id, self._max_resumes)
        try:
            while not stream.is_over:
                call = stream.call(self._stub, self._metadata)
                try:
                    async for message in call:
                        if (chunk := stream.take(message)) is not None:
                            yield chunk
                    stream.ended()
                except grpc.RpcError as error:
                    await asyncio.sleep(stream.broke(error))
                finally:
                    call.cancel()
        finally:
            stream.span.end()
            if not stream.is_over:
                with contextlib.suppress(grpc.RpcError):
                    await self._abort(stream.request_id, ABORT_TIMEOUT_S)

    async def generate(
        self,
        prompt: Prompt,
        sampling: Sampling = DEFAULTS,
        *,
        deadline_s: float | None = None,
        request_id: str = "",
    ) -> Answer:
        """stream(), put together."""
        chunks = self.stream(prompt, sampling, deadline_s=deadline_s, request_id=request_id)
        async with contextlib.aclosing(chunks):
            return to_answer([chunk async for chunk in chunks])

    async def model(self, deadline_s: float | None = None) -> Model:
        """What is served. Raises Unavailable while it is not."""
        try:
            call = self._stub.GetModel(pb.GetModelRequest(), timeout=deadline_s, metadata=self._metadata)
            return to_model(await call)
        except grpc.RpcError as error:
            raise to_error(error) from error

    async def abort(self, request_id: str, deadline_s: float | None = None) -> bool:
        """End a request by the gateway's id or the client's own. False when none of that id ran."""
        try:
            answer = await self._abort(request_id, deadline_s)
        except grpc.RpcError as error:
            raise to_error(error) from error
        return bool(answer.was_running)

    def _abort(self, request_id: str, timeout_s: float | None) -> Any:
        asked = pb.AbortRequestRequest(request_id=request_id)
        return self._stub.AbortRequest(asked, timeout=timeout_s, metadata=self._metadata)


class Client:
    """The same, blocking; threads may share it."""

    def __init__(self, address: str, max_resumes: int = MAX_RESUMES, api_key: str | None = None) -> None:
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub: Any = client_pb2_grpc.TandemStub(self._channel)
        self._max_resumes = max_resumes
        self._metadata = tuple(authorization(api_key).items())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what still runs."""
        self._channel.close()

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling = DEFAULTS,
        *,
        deadline_s: float | None = None,
        request_id: str = "",
    ) -> Generator[Chunk, None, None]:
        """See AsyncClient.stream."""
        stream = _begin(prompt, sampling, deadline_s, request_id, self._max_resumes)
        try:
            while not stream.is_over:
                call = stream.call(self._stub, self._metadata)
                try:
                    for message in call:
                        if (chunk := stream.take(message)) is not None:
                            yield chunk
                    stream.ended()
                except grpc.RpcError as error:
                    time.sleep(stream.broke(error))
                finally:
                    call.cancel()
        finally:
            stream.span.end()
            if not stream.is_over:
                with contextlib.suppress(grpc.RpcError):
                    self._abort(stream.request_id, ABORT_TIMEOUT_S)

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling = DEFAULTS,
        *,
        deadline_s: float | None = None,
        request_id: str = "",
    ) -> Answer:
        """stream(), put together."""
        chunks = self.stream(prompt, sampling, deadline_s=deadline_s, request_id=request_id)
        with contextlib.closing(chunks):
            return to_answer(chunks)

    def model(self, deadline_s: float | None = None) -> Model:
        """See AsyncClient.model."""
        try:
            asked = pb.GetModelRequest()
            return to_model(self._stub.GetModel(asked, timeout=deadline_s, metadata=self._metadata))
        except grpc.RpcError as error:
            raise to_error(error) from error

    def abort(self, request_id: str, deadline_s: float | None = None) -> bool:
        """See AsyncClient.abort."""
        try:
            answer = self._abort(request_id, deadline_s)
        except grpc.RpcError as error:
            raise to_error(error) from error
        return bool(answer.was_running)

    def _abort(self, request_id: str, timeout_s: float | None) -> Any:
        asked = pb.AbortRequestRequest(request_id=request_id)
        return self._stub.AbortRequest(asked, timeout=timeout_s, metadata=self._metadata)


def _begin(
    prompt: Prompt, sampling: Sampling, deadline_s: float | None, request_id: str, max_resumes: int
) -> ResumedStream:
    """A stream that can be aborted from its first moment: it has an id before the gateway gives it one."""
    request = make_request(prompt, sampling, request_id or secrets.token_hex(10))
    return ResumedStream(request, deadline_s, max_resumes)
