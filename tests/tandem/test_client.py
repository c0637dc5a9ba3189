"""The Python client, blocking and asynchronous, against a gateway that plays a script."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import pytest_asyncio

from core.errors import (
    Busy,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    StreamNotFound,
    TandemError,
    Unauthenticated,
    Unavailable,
)
from proto import client_pb2 as pb
from proto import client_pb2_grpc, convert
from tandem.client import AsyncClient, Chunk, Client, Message, Model, Sampling, StructuredOutputs
from tandem.client_messages import make_request
from tandem.client_stream import MAX_PAUSE_S, ResumedStream

LIMIT_S = 20.0
TOKEN = "token"
Ask = Callable[..., Any]


def script(num_tokens: int) -> list[pb.GenerateChunk]:
    """A stream as the gateway sends it: its opening, then a chunk for each token."""
    opening = pb.GenerateChunk(request_id="r", resume_token=TOKEN)
    choices = [pb.Choice(text=f"{n},", token_ids=[n]) for n in range(num_tokens)]
    chunks = [pb.GenerateChunk(request_id="r", choice=choice) for choice in choices]
    chunks[-1].choice.finish_reason = convert.FINISH_REASONS["length"]
    chunks[-1].usage.CopyFrom(pb.Usage(num_prompt_tokens=3, num_completion_tokens=num_tokens))
    chunks[-1].choice.timing.CopyFrom(pb.Timing(total_s=1.5, decode_worker_id="d", causes=["worker_lost"]))
    return [opening, *chunks]


@dataclass
class Gateway(client_pb2_grpc.TandemServicer):
    """Plays `chunks`. The nth call breaks after `breaks[n]` of them, as a lost connection does; what comes after all
    chunks is `error`, if there is one."""

    chunks: list[pb.GenerateChunk] = field(default_factory=lambda: script(6))
    breaks: Sequence[int] = ()
    error: tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]] | None = None
    stays_open: bool = False
    requests: list[Any] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    address: str = ""
    keys: list[str] = field(default_factory=list)

    def _note_key(self, context: Any) -> None:
        self.keys.append(dict(context.invocation_metadata()).get("authorization", ""))

    async def GenerateStream(self, request: Any, context: Any) -> None:
        await self._play(request, context, 0)

    async def ResumeStream(self, request: Any, context: Any) -> None:
        await self._play(request, context, request.offset)

    async def _play(self, request: Any, context: Any, offset: int) -> None:
        self._note_key(context)
        number = len(self.requests)
        self.requests.append(request)
        end = offset + self.breaks[number] if number < len(self.breaks) else len(self.chunks)
        for chunk in self.chunks[offset:end]:
            await context.write(chunk)
        if number < len(self.breaks):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        if self.error is not None:
            await context.abort(*self.error)
        if self.stays_open:
            await asyncio.sleep(LIMIT_S)

    async def AbortRequest(self, request: Any, context: Any) -> pb.AbortRequestResponse:
        self._note_key(context)
        self.aborted.append(request.request_id)
        return pb.AbortRequestResponse(was_running=request.request_id == "r")

    async def GetModel(self, request: Any, context: Any) -> pb.GetModelResponse:
        self._note_key(context)
        return pb.GetModelResponse(model="m", fingerprint="f", context_len=64, vocab_size=300)


@pytest_asyncio.fixture
async def gateway() -> AsyncIterator[Gateway]:
    server = grpc.aio.server()
    made = Gateway()
    client_pb2_grpc.add_TandemServicer_to_server(made, server)
    made.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield made
    await server.stop(None)


async def ask_async(address: str, method: str, *arguments: Any, max_resumes: int = 3, **named: Any) -> Any:
    async with AsyncClient(address, max_resumes) as client:
        if method == "stream":
            return [chunk async for chunk in client.stream(*arguments, **named)]
        return await getattr(client, method)(*arguments, **named)


async def ask_blocking(address: str, method: str, *arguments: Any, max_resumes: int = 3, **named: Any) -> Any:
    def work() -> Any:
        with Client(address, max_resumes) as client:
            result = getattr(client, method)(*arguments, **named)
            return list(result) if method == "stream" else result

    return await asyncio.to_thread(work)


@pytest.fixture(params=[ask_async, ask_blocking], ids=["async", "blocking"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """`await ask(address, method, ...)` over either client."""
    made: Ask = request.param
    return made


def tokens(chunks: Sequence[Chunk]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


async def test_a_stream_comes_as_typed_chunks_and_the_last_has_the_figures(gateway, ask):
    chunks = await ask(gateway.address, "stream", "hello")
    assert tokens(chunks) == list(range(6))
    assert "".join(chunk.text for chunk in chunks) == "0,1,2,3,4,5,"
    assert [chunk.finish_reason for chunk in chunks] == [""] * 5 + ["length"]
    assert all(chunk.timing is None and chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage.num_prompt_tokens == 3
    assert chunks[-1].timing.total_s == 1.5
    assert chunks[-1].timing.causes == ("worker_lost",)


@pytest.mark.parametrize(
    ("given", "environment", "sent"),
    [
        (None, None, ""),
        (None, "of-all", "Bearer of-all"),
        ("mine", "of-all", "Bearer mine"),
        ("", "of-all", ""),
        ("mine", None, "Bearer mine"),
    ],
)
async def test_a_key_goes_with_every_call(gateway, monkeypatch, given, environment, sent):
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)
    if environment is not None:
        monkeypatch.setenv("TANDEM_API_KEY", environment)

    def ask_all() -> None:
        with Client(gateway.address, api_key=given) as client:
            client.generate("hello")
            client.model()
            client.abort("r")

    gateway.breaks = (2,)
    await asyncio.to_thread(ask_all)
    gateway.requests.clear()
    async with AsyncClient(gateway.address, api_key=given) as client:
        await client.generate("hello")
        await client.model()
        await client.abort("r")
    assert gateway.keys == [sent] * 8, "each stream was resumed once"


async def test_an_unknown_key_is_a_typed_error(gateway, ask):
    trailing = (("tandem-code", "invalid_api_key"), ("tandem-field", ""))
    gateway.chunks, gateway.error = [], (grpc.StatusCode.UNAUTHENTICATED, "no such key", trailing)
    with pytest.raises(Unauthenticated, match="no such key"):
        await ask(gateway.address, "stream", "hello")


async def test_an_answer_is_the_stream_put_together(gateway, ask):
    answer = await ask(gateway.address, "generate", "hello")
    assert (answer.request_id, answer.text) == ("r", "0,1,2,3,4,5,")
    assert answer.token_ids == tuple(range(6))
    assert answer.finish_reason == "length"
    assert answer.timing.decode_worker_id == "d"


@pytest.mark.parametrize("breaks", [[1], [3], [7], [1, 1, 1, 1, 1, 1], [2, 0, 0, 3]])
async def test_a_broken_stream_goes_on_where_it_was(gateway, ask, breaks):
    gateway.breaks = breaks
    chunks = await ask(gateway.address, "stream", "hello")
    assert tokens(chunks) == list(range(6))
    resumed = gateway.requests[1:]
    received = [sum(breaks[: n + 1]) for n in range(len(resumed))]
    assert [request.offset for request in resumed] == received
    assert {request.resume_token for request in resumed} <= {TOKEN}


async def test_it_gives_up_when_nothing_new_arrives(gateway, ask):
    gateway.breaks = [2] + [0] * 10
    with pytest.raises(Unavailable):
        await ask(gateway.address, "stream", "hello", max_resumes=2)
    assert len(gateway.requests) == 3


async def test_a_request_that_brought_nothing_is_not_sent_twice(gateway, ask):
    gateway.breaks = [0]
    with pytest.raises(Unavailable):
        await ask(gateway.address, "stream", "hello")
    assert len(gateway.requests) == 1


async def test_a_connection_that_breaks_after_the_end_is_no_error(gateway, ask):
    gateway.breaks = [7]
    assert tokens(await ask(gateway.address, "stream", "hello", max_resumes=0)) == list(range(6))


def told(
    code: str, field: str = "", retry_after_s: str = ""
) -> tuple[tuple[str, str], tuple[str, str], tuple[str, str]]:
    return ("tandem-code", code), ("tandem-field", field), ("tandem-retry-after-s", retry_after_s)


ERRORS = [
    (grpc.StatusCode.INVALID_ARGUMENT, "top_p: wrong", told("invalid_request", "top_p"), InvalidRequest),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "full", told("busy", "", "2.5"), Busy),
    (grpc.StatusCode.NOT_FOUND, "not held", told("stream_not_found"), StreamNotFound),
    (grpc.StatusCode.UNAVAILABLE, "no worker", told("unavailable"), Unavailable),
    (grpc.StatusCode.UNIMPLEMENTED, "what?", (), EngineFailed),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error[3].__name__)
async def test_what_the_gateway_says_is_raised_as_what_it_is(gateway, ask, error):
    gateway.chunks, gateway.error = gateway.chunks[:3], error[:3]
    with pytest.raises(TandemError) as caught:
        await ask(gateway.address, "generate", "hello")
    assert type(caught.value) is error[3]
    assert len(gateway.requests) == 1
    if isinstance(caught.value, InvalidRequest):
        assert (caught.value.field, str(caught.value)) == ("top_p", "wrong")
    if isinstance(caught.value, Busy):
        assert caught.value.retry_after_s == 2.5


async def test_a_stream_without_an_end_is_an_error(gateway, ask):
    gateway.chunks = gateway.chunks[:3]
    with pytest.raises(EngineFailed):
        await ask(gateway.address, "stream", "hello")


async def test_a_deadline_holds_over_all_connections(gateway, ask):
    gateway.breaks, gateway.stays_open = [2, 0, 0], True
    gateway.chunks = gateway.chunks[:2]
    with pytest.raises(DeadlineExceeded):
        await ask(gateway.address, "stream", "hello", deadline_s=1.0)


async def test_nobody_at_the_address_is_unavailable(ask):
    with pytest.raises(Unavailable):
        await ask("127.0.0.1:1", "generate", "hello")
    with pytest.raises(Unavailable):
        await ask("127.0.0.1:1", "model")


async def test_model_and_abort(gateway, ask):
    assert await ask(gateway.address, "model") == Model("m", "f", 64, 300)
    assert await ask(gateway.address, "abort", "r")
    assert not await ask(gateway.address, "abort", "other")


async def test_closing_a_stream_early_aborts_its_request(gateway):
    async with AsyncClient(gateway.address) as client:
        async with contextlib.aclosing(client.stream("hello")) as stream:
            await anext(stream)
        assert gateway.aborted == ["r"]

    def leave() -> None:
        with Client(gateway.address) as client, contextlib.closing(client.stream("hello")) as stream:
            next(stream)

    await asyncio.to_thread(leave)
    assert gateway.aborted == ["r", "r"]


async def test_who_is_cancelled_before_anything_arrived_aborts_by_the_id_that_it_gave(gateway):
    gateway.chunks, gateway.stays_open = [], True
    async with AsyncClient(gateway.address) as client:
        work = asyncio.create_task(client.generate("hello", request_id="mine"))
        async with asyncio.timeout(LIMIT_S):
            while not gateway.requests:
                await asyncio.sleep(0.01)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
    assert gateway.aborted == ["mine"]


async def test_a_stream_that_was_read_to_its_end_is_not_aborted(gateway, ask):
    await ask(gateway.address, "generate", "hello")
    assert gateway.aborted == []


def test_every_field_of_sampling_is_sent_and_none_that_was_not_given():
    values = {"stop": ("a", "b"), "bad_words": ("x",), "logit_bias": {4: 1.5}}
    ids = {"stop_token_ids": (1, 2), "allowed_token_ids": (3,), "cache_salt": "mine"}
    flags = dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "echo"), True)
    form = {"structured_outputs": StructuredOutputs(choice=("yes", "no"))}
    given = {**values, **ids, **flags, **form}
    sampling = Sampling(**{name: given.get(name, 1) for name in Sampling.__dataclass_fields__})
    request = make_request([1, 2, 3], sampling, "mine")
    assert list(request.structured_outputs.choice) == ["yes", "no"]
    names = {descriptor.name for descriptor, _ in request.ListFields()}
    assert names == {*Sampling.__dataclass_fields__, "token_ids", "client_request_id", "resumable"}
    assert make_request("", Sampling(temperature=0), "").HasField("temperature")
    bare = make_request("hello", Sampling(), "mine")
    assert {d.name for d, _ in bare.ListFields()} == {"text", "client_request_id", "resumable"}


def test_a_prompt_is_text_messages_or_ids():
    assert make_request("hi", Sampling(), "").text == "hi"
    assert list(make_request([3, 4], Sampling(), "").token_ids.ids) == [3, 4]
    chat = make_request([Message("user", "hi")], Sampling(), "").chat
    assert [(message.role, message.content) for message in chat.messages] == [("user", "hi")]


@pytest.mark.parametrize(
    ("prompt", "sampling", "named"),
    [
        ("hi", Sampling(seed=-1), "seed"),
        ("hi", Sampling(max_tokens=-1), "max_tokens"),
        ("hi", Sampling(stop=(1,)), "stop"),  # type: ignore[arg-type]
        ([1, "a"], Sampling(), "token_ids"),
        ([Message("user", "hi"), 3], Sampling(), "token_ids"),
    ],
)
def test_what_no_field_can_hold_is_refused_by_name(prompt, sampling, named):
    with pytest.raises(InvalidRequest) as caught:
        make_request(prompt, sampling, "")
    assert caught.value.field == named


class Broken(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "Socket closed"

    def trailing_metadata(self) -> tuple[()]:
        return ()


def test_pauses_grow_to_a_bound_begin_anew_after_a_chunk_and_end_with_the_deadline():
    now_s = 0.0
    stream = ResumedStream(pb.GenerateRequest(), 100.0, 9, lambda: now_s)
    opening, first = script(1)
    stream.take(opening)
    pauses = [stream.broke(Broken()) for _ in range(9)]
    assert pauses == sorted(pauses)
    assert pauses[0] < pauses[-1] == MAX_PAUSE_S
    first.ClearField("usage")
    stream.take(first)
    assert stream.broke(Broken()) == pauses[0]
    now_s = 99.99
    assert stream.broke(Broken()) == pytest.approx(0.01)
    now_s = 101.0
    with pytest.raises(DeadlineExceeded):
        stream.broke(Broken())
    assert stream.is_over
