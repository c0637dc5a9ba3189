"""The OpenAI endpoints and the operators' ones, over Starlette. Everything beyond the protocol is in `serving`."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from cluster.tracing import HEADER
from core.errors import (
    Busy,
    Cancelled,
    EngineFailed,
    InvalidRequest,
    TandemError,
    Unauthenticated,
    Unavailable,
)
from gateway.answer import Answer
from gateway.ask import Arrival
from gateway.front.body_parser import BodyParser
from gateway.front.chat_objects import ChatShape
from gateway.front.event_streams import StreamWishes, choice_events, response_events
from gateway.front.openai_objects import CompletionShape, Envelope, Shape, error_object, http_status
from gateway.front.readers import Asked, Detokenizing, Tokenizing
from gateway.front.responses_objects import ResponseWriter
from gateway.front.static_page import page, page_routes
from gateway.overview import overview, to_json
from gateway.serving import Serving
from gateway.text_generation import TextChunk

MAX_REQUEST_ID_LEN = 128
MAX_NUMBER_LEN = 18
TIMING_HEADER = "x-tandem-timing"
REQUEST_ID_HEADER = "x-request-id"
ALSO_A_PAGE = {"vary": "accept", "cache-control": "no-store"}
Result = TypeVar("Result")
Handler = Callable[[Request], Awaitable[Response]]
RETRY_AFTER_S = 1
CLIENT_GONE = 499
BODY_TIMEOUT_S = 30.0


class HttpFront:
    """The handlers. `app` is the ASGI application."""

    def __init__(self, serving: Serving, bodies: BodyParser, max_body_bytes: int) -> None:
        self._serving = serving
        self._max_body_bytes = max_body_bytes
        self._bodies = bodies
        self._cluster_page = page("cluster.html")
        self.app = Starlette(
            routes=[
                *self._keyed_routes(),
                Route("/health", self.health),
                Route("/ready", self.ready),
                Route("/metrics", self.metrics),
                Route("/cluster", self.cluster),
                *page_routes(),
            ],
            exception_handlers={TandemError: _on_error, HTTPException: _on_http_error, Exception: _on_bug},
        )

    def _keyed_routes(self) -> list[Route]:
        """All but what operators and their tools look at, which has nothing of what requests contain."""
        keyed = self._keyed
        return [
            Route("/v1/models", keyed(self.models)),
            Route("/v1/models/{model:path}", keyed(self.model)),
            Route("/v1/completions", keyed(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", keyed(self.chat), methods=["POST"]),
            Route("/v1/responses", keyed(self.responses), methods=["POST"]),
            Route("/v1/tokenize", keyed(self.tokenize), methods=["POST"]),
            Route("/tokenize", keyed(self.tokenize), methods=["POST"]),
            Route("/v1/detokenize", keyed(self.detokenize), methods=["POST"]),
            Route("/detokenize", keyed(self.detokenize), methods=["POST"]),
            Route("/v1/embeddings", keyed(self.embeddings), methods=["POST"]),
            Route("/flush_cache", keyed(self.flush_cache), methods=["POST"]),
        ]

    def _keyed(self, handler: Handler) -> Handler:
        """`handler`, for requests with a key only; refused are others before their body is read."""

        async def keyed(request: Request) -> Response:
            request.state.tenant = self._serving.tenant(request.headers.get("authorization", ""))
            return await handler(request)

        return keyed

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, "completion", CompletionShape)

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, "chat", ChatShape)

    async def responses(self, request: Request) -> Response:
        arrival = _arrival(request)
        asked = await self._asked(request, "response")
        answer = await self._serving.prepare(asked.ask, arrival)
        writer = ResponseWriter(answer, asked.echo, self._serving.model_id)
        headers = {REQUEST_ID_HEADER: asked.ask.client_request_id or answer.request_id}
        wants_timing = TIMING_HEADER in request.headers
        if asked.is_stream:
            events = partial(response_events, writer=writer, wants_timing=wants_timing)
            return await _stream(request, answer, headers, events)
        (only_choice,) = await _unless_gone(request, answer.whole())
        whole = writer.whole(only_choice)
        if wants_timing:
            whole["timing"] = writer.timing()
        return JSONResponse(whole, headers=headers)

    async def tokenize(self, request: Request) -> Response:
        asked: Tokenizing = await self._bodies.parse("tokenize", await self._read(request))
        if asked.model is not None:
            self._serving.check_model(asked.model)
        ids = await self._serving.tokenize(asked.prompt)
        length = self._serving.context_len
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": length})

    async def detokenize(self, request: Request) -> Response:
        asked: Detokenizing = await self._bodies.parse("detokenize", await self._read(request))
        if asked.model is not None:
            self._serving.check_model(asked.model)
        return JSONResponse({"prompt": await self._serving.detokenize(asked.token_ids)})

    async def embeddings(self, request: Request) -> Response:
        raise HTTPException(404, "this server generates text only: there are no embeddings")

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_object()]})

    async def model(self, request: Request) -> Response:
        self._serving.check_model(request.path_params["model"])
        return JSONResponse(self._model_object())

    async def health(self, request: Request) -> Response:
        """Alive: depends on nobody else."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Can serve: both tiers are connected."""
        is_ready = self._serving.fleet.is_ready
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._serving.metrics.render(), media_type="text/plain; version=0.0.4")

    async def flush_cache(self, request: Request) -> Response:
        """Every worker forgets its cached blocks; 503 when not all could be told."""
        told, missed = self._serving.fleet.clear_caches()
        return JSONResponse({"told": told, "missed": missed}, 200 if told and not missed else 503)

    async def cluster(self, request: Request) -> Response:
        """What operators look at: a page for a browser, JSON for everybody else; `after` leaves out ended requests
        up to that number."""
        if "text/html" in request.headers.get("accept", ""):
            return self._cluster_page()
        view = overview(self._serving, _after(request))
        return Response(to_json(view), headers=ALSO_A_PAGE, media_type="application/json")

    async def _asked(self, request: Request, reader: str) -> Asked:
        """Raises InvalidRequest or Busy, or what reading the body raises; counted."""
        try:
            raw, client_request_id = await self._read(request), _request_id(request)
            asked: Asked = await self._bodies.parse(reader, raw, client_request_id=client_request_id)
        except TandemError as error:
            self._serving.refused(error)
            raise
        except HTTPException as error:
            is_gone = error.status_code == CLIENT_GONE
            self._serving.refused(Cancelled() if is_gone else InvalidRequest("body", error.detail))
            raise
        return asked

    async def _read(self, request: Request) -> bytes:
        """The body, bounded in bytes and time. Raises HTTPException 413, 408, or 499 when the client left."""
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await self._read_bounded(request)
        except TimeoutError:
            raise HTTPException(408, f"the body did not come within {BODY_TIMEOUT_S:g} s") from None
        except ClientDisconnect:
            raise HTTPException(CLIENT_GONE, "the client left") from None

    async def _read_bounded(self, request: Request) -> bytes:
        chunks: list[bytes] = []
        num_bytes = 0
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes > self._max_body_bytes:
                raise HTTPException(413, f"the body is larger than {self._max_body_bytes} bytes")
            chunks.append(chunk)
        return b"".join(chunks)

    async def _generate(self, request: Request, reader: str, shape: type[Shape]) -> Response:
        arrival = _arrival(request)
        asked = await self._asked(request, reader)
        ask = asked.ask
        answer = await self._serving.prepare(ask, arrival)
        envelope = Envelope(shape(self._serving.tokenizer, ask), answer, self._serving.model_id)
        headers = {REQUEST_ID_HEADER: ask.client_request_id or answer.request_id}
        wants_timing = TIMING_HEADER in request.headers
        if asked.is_stream:
            wishes = StreamWishes(asked.wants_usage, asked.wants_running_usage, wants_timing)
            events = partial(choice_events, num_choices=ask.num_choices, envelope=envelope, wishes=wishes)
            return await _stream(request, answer, headers, events)
        whole = await envelope.whole(await _unless_gone(request, answer.whole()), wants_timing)
        return Response(whole, headers=headers, media_type="application/json")

    def _model_object(self) -> dict[str, Any]:
        model: dict[str, Any] = {
            "id": self._serving.model_id,
            "object": "model",
            "created": 0,
            "owned_by": "tandem",
        }
        with contextlib.suppress(Unavailable):
            model["max_model_len"] = self._serving.context_len
        return model


async def _unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled (and with it the request on both tiers) when the client leaves."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            raise HTTPException(CLIENT_GONE, "the client left")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


Events = Callable[[TextChunk, AsyncGenerator[TextChunk, None]], AsyncIterator[bytes]]


async def _stream(request: Request, answer: Answer, headers: dict[str, str], make_events: Events) -> Response:
    """The status is decided by the first chunk: until there is one an error is a proper error answer."""
    chunks = answer.chunks()
    first = await _unless_gone(request, anext(chunks))
    headers = {**headers, "cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(make_events(first, chunks), media_type="text/event-stream", headers=headers)


def _arrival(request: Request) -> Arrival:
    """Now."""
    return Arrival(trace_parent=request.headers.get(HEADER, ""), tenant=request.state.tenant)


def _after(request: Request) -> int:
    """Raises InvalidRequest."""
    given = request.query_params.get("after", "0")
    if not (given.isdecimal() and len(given) <= MAX_NUMBER_LEN):
        raise InvalidRequest("after", "the number of an ended request is expected")
    return int(given)


def _request_id(request: Request) -> str:
    """The client's own id for logs and echo: bounded, visible ASCII, never a key."""
    given = request.headers.get(REQUEST_ID_HEADER, "")[:MAX_REQUEST_ID_LEN]
    return "".join(character for character in given if "!" <= character <= "~")


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TandemError)
    headers = {}
    if isinstance(error, Busy | Unavailable) or error.retryable:
        headers["retry-after"] = str(round(getattr(error, "retry_after_s", RETRY_AFTER_S)) or RETRY_AFTER_S)
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_object(error), http_status(error), headers=headers)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = error_object(InvalidRequest("body", error.detail))
    return JSONResponse(body, error.status_code, headers=error.headers)


async def _on_bug(request: Request, error: Exception) -> Response:
    return JSONResponse(error_object(EngineFailed("internal error")), 500)
