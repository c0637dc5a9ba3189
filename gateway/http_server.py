"""The OpenAI endpoints and the operators' ones, over Starlette. Everything beyond the protocol is in `serving`."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from core.errors import Busy, EngineFailed, InvalidRequest, TandemError, Unavailable
from gateway.answer import Answer
from gateway.ask import Ask
from gateway.body_parser import BodyParser
from gateway.chat_objects import ChatShape
from gateway.event_streams import StreamWishes, choice_events, response_events
from gateway.json_text import large_json
from gateway.openai_objects import CompletionShape, Envelope, Json, Shape, error_object, http_status
from gateway.openai_schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse_body
from gateway.responses_objects import ResponseWriter
from gateway.responses_schema import UNSUPPORTED, ResponsesBody
from gateway.serving import Serving
from gateway.static_page import page_routes
from gateway.text_generation import TextChunk

MAX_REQUEST_ID_LEN = 128
TIMING_HEADER = "x-tandem-timing"
REQUEST_ID_HEADER = "x-request-id"
Result = TypeVar("Result")
RETRY_AFTER_S = 1
BODY_TIMEOUT_S = 30.0


class HttpFront:
    """The handlers. `app` is the ASGI application."""

    def __init__(self, serving: Serving, bodies: BodyParser, max_body_bytes: int) -> None:
        self._serving = serving
        self._max_body_bytes = max_body_bytes
        self._bodies = bodies
        self.app = Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/models/{model:path}", self.model),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/responses", self.responses, methods=["POST"]),
                Route("/v1/tokenize", self.tokenize, methods=["POST"]),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/v1/detokenize", self.detokenize, methods=["POST"]),
                Route("/detokenize", self.detokenize, methods=["POST"]),
                Route("/v1/embeddings", self.embeddings, methods=["POST"]),
                Route("/health", self.health),
                Route("/ready", self.ready),
                Route("/metrics", self.metrics),
                Route("/cluster", self.cluster),
                *page_routes(),
            ],
            exception_handlers={TandemError: _on_error, HTTPException: _on_http_error, Exception: _on_bug},
        )

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionBody, CompletionShape)

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, ChatBody, ChatShape)

    async def responses(self, request: Request) -> Response:
        parse = partial(parse_body, kind=ResponsesBody, unsupported=UNSUPPORTED)
        body, ask = await self._asked(request, parse)
        answer = await self._serving.prepare(ask)
        writer = ResponseWriter(answer, body, self._serving.model_id)
        headers = {REQUEST_ID_HEADER: ask.client_request_id or answer.request_id}
        wants_timing = TIMING_HEADER in request.headers
        if body.stream:
            events = partial(response_events, writer=writer, wants_timing=wants_timing)
            return await _stream(request, answer, headers, events)
        (only_choice,) = await _unless_gone(request, answer.whole())
        timing = writer.timing() if wants_timing else None
        return await _whole(partial(writer.whole, only_choice), timing, headers)

    async def tokenize(self, request: Request) -> Response:
        body: TokenizeBody = await self._parse(request, partial(parse_body, kind=TokenizeBody))
        if body.model is not None:
            self._serving.check_model(body.model)
        ids = await self._serving.tokenize(body.to_prompt())
        length = self._serving.context_len
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": length})

    async def detokenize(self, request: Request) -> Response:
        body: DetokenizeBody = await self._parse(request, partial(parse_body, kind=DetokenizeBody))
        if body.model is not None:
            self._serving.check_model(body.model)
        return JSONResponse({"prompt": await self._serving.detokenize(body.tokens)})

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

    async def cluster(self, request: Request) -> Response:
        """What operators look at: workers with their load, live requests with their stage."""
        workers = [
            {
                "record": asdict(link.record),
                "load": asdict(link.load),
                "is_up": link.is_up,
                "num_open": link.num_open,
            }
            for link in self._serving.fleet.links
        ]
        live = [
            {"request_id": request_id, **asdict(entry.report)}
            for request_id, entry in self._serving.orchestrator.live.items()
        ]
        names = {"model": self._serving.model_id, "grpc": self._serving.grpc_address}
        return JSONResponse({**names, "workers": workers, "requests": live})

    async def _asked(self, request: Request, parse: Callable[[bytes], Any]) -> tuple[Any, Ask]:
        """The body as `parse` makes it, and what it asks for. Raises InvalidRequest, or what reading it raises."""
        ask = partial(_body_and_ask, parse=parse, client_request_id=_request_id(request))
        return await self._parse(request, ask)

    async def _parse(self, request: Request, parse: Callable[[bytes], Result]) -> Result:
        return await self._bodies.parse(await self._read(request), parse)

    async def _read(self, request: Request) -> bytes:
        """The body, bounded in bytes and time. Raises HTTPException 413, 408, or 499 when the client left."""
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await self._read_bounded(request)
        except TimeoutError:
            raise HTTPException(408, f"the body did not come within {BODY_TIMEOUT_S:g} s") from None
        except ClientDisconnect:
            raise HTTPException(499, "the client left") from None

    async def _read_bounded(self, request: Request) -> bytes:
        chunks: list[bytes] = []
        num_bytes = 0
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes > self._max_body_bytes:
                raise HTTPException(413, f"the body is larger than {self._max_body_bytes} bytes")
            chunks.append(chunk)
        return b"".join(chunks)

    async def _generate(
        self, request: Request, kind: type[CompletionBody | ChatBody], shape: type[Shape]
    ) -> Response:
        body, ask = await self._asked(request, partial(parse_body, kind=kind))
        answer = await self._serving.prepare(ask)
        envelope = Envelope(shape(self._serving.tokenizer, ask), answer, self._serving.model_id)
        headers = {REQUEST_ID_HEADER: ask.client_request_id or answer.request_id}
        wants_timing = TIMING_HEADER in request.headers
        if body.stream:
            wishes = StreamWishes(body.wants_usage, body.wants_running_usage, wants_timing)
            events = partial(choice_events, num_choices=ask.num_choices, envelope=envelope, wishes=wishes)
            return await _stream(request, answer, headers, events)
        choices = await _unless_gone(request, answer.whole())
        timing = envelope.timing() if wants_timing else None
        return await _whole(partial(envelope.whole, choices), timing, headers)

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


def _body_and_ask(raw: bytes, parse: Callable[[bytes], Any], client_request_id: str) -> tuple[Any, Ask]:
    body = parse(raw)
    return body, body.ask(client_request_id)


async def _whole(make: Callable[[], Json], timing: Json | None, headers: dict[str, str]) -> Response:
    """An answer in one piece, made and written in a thread: the scores of a prompt's tokens may be many."""

    def written() -> bytes:
        return large_json(make() if timing is None else {**make(), "timing": timing}).encode()

    body = await asyncio.to_thread(written)
    return Response(body, media_type="application/json", headers=headers)


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
            raise HTTPException(499, "the client left")
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


def _request_id(request: Request) -> str:
    """The client's own id for logs and echo: bounded, visible ASCII, never a key."""
    given = request.headers.get(REQUEST_ID_HEADER, "")[:MAX_REQUEST_ID_LEN]
    return "".join(character for character in given if "!" <= character <= "~")


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TandemError)
    headers = {}
    if isinstance(error, Busy | Unavailable) or error.retryable:
        headers["retry-after"] = str(round(getattr(error, "retry_after_s", RETRY_AFTER_S)) or RETRY_AFTER_S)
    return JSONResponse(error_object(error), http_status(error), headers=headers)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = error_object(InvalidRequest("body", error.detail))
    return JSONResponse(body, error.status_code, headers=error.headers)


async def _on_bug(request: Request, error: Exception) -> Response:
    return JSONResponse(error_object(EngineFailed("internal error")), 500)
