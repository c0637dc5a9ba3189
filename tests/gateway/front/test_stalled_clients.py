"""Clients that keep their connection and read nothing: what they hold in the gateway has an end."""

import asyncio
import json
import socket

import grpc
import pytest
import uvicorn

from gateway.front.body_parser import BodyParser
from gateway.front.grpc_server import create_server
from gateway.front.http_server import HttpFront
from gateway.main import _HttpServer, listen
from gateway.routing.attempt import CREDIT_TOKENS
from gateway.serving import Serving
from proto import client_pb2 as pb
from proto import client_pb2_grpc
from tests.gateway.peers import LIMIT_S
from tests.gateway.served import Served

STALL_S = 0.5


async def flood(served: Served) -> int:
    """Answer the next request with as many tokens as its credit allows, until the gateway aborts it; their number."""
    decode = await served.to_decode("a")
    num_sent, credit = 0, CREDIT_TOKENS
    while credit:
        served.emit(decode, "b" * credit)
        num_sent += credit
        async with asyncio.timeout(4 * LIMIT_S):
            command = await decode.commands.get()
        credit = command.credit.num_tokens
    assert command.HasField("abort")
    return num_sent


async def read_on(call, chunks: list[pb.GenerateChunk]) -> None:
    while (chunk := await call.read()) is not grpc.aio.EOF:
        chunks.append(chunk)


def num_live(serving: Serving) -> int:
    return len(serving.orchestrator.live)


async def test_a_grpc_stream_that_is_not_read_ends_with_a_typed_error(served):
    server, _ = create_server(served.serving, BodyParser(), STALL_S)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    options = (("grpc.http2.bdp_probe", 0),)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        ids = pb.TokenIds(ids=[1, 2, 3])
        call = client_pb2_grpc.TandemStub(channel).GenerateStream(pb.GenerateRequest(token_ids=ids))
        num_sent = await flood(served)
        assert num_live(served.serving) == 0
        chunks: list[pb.GenerateChunk] = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_on(call, chunks)
        assert 0 < len(chunks) < num_sent
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert ("tandem-code", "deadline_exceeded") in map(tuple, caught.value.trailing_metadata())
    await server.stop(0)


async def test_an_http_connection_that_is_not_read_is_broken(served):
    listener = listen("127.0.0.1:0", STALL_S)
    app = HttpFront(served.serving, BodyParser(), 1 << 20).app
    http = _HttpServer(uvicorn.Config(app, log_level="warning", lifespan="off"))
    running = asyncio.create_task(http.serve(sockets=[listener]))
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        body = json.dumps({"model": "m", "prompt": [1, 2, 3], "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % len(body)
        client.sendall(head + body)
        await flood(served)
        assert num_live(served.serving) == 0
    http.should_exit = True
    await running


def test_what_is_accepted_sends_small_pieces_at_once_and_notices_who_takes_none():
    with (
        listen("127.0.0.1:0", STALL_S) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * STALL_S
