"""Both doors with API keys: who has none gets nothing, who has one its own; and what may be said of a salt."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from core.block_hash import cache_salt
from gateway.front.body_parser import BodyParser
from gateway.front.grpc_server import create_server
from gateway.front.http_server import HttpFront
from gateway.tenants import read_tenants
from proto import client_pb2 as pb
from proto import client_pb2_grpc
from tests.gateway.peers import LIMIT_S, Rig
from tests.gateway.served import Served

KEYED = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/m"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/tokenize"),
    ("POST", "/tokenize"),
    ("POST", "/v1/detokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/embeddings"),
    ("POST", "/flush_cache"),
]
OPEN = ["/health", "/ready", "/metrics", "/cluster", "/", "/page/app.js"]
WRONG = ["", "Bearer", "Bearer wrong", "Basic key-a"]
KEY_A = {"authorization": "Bearer key-a"}
BODIES = {
    "/v1/completions": {"model": "m", "prompt": "x", "max_tokens": 1},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/responses": {"model": "m", "input": "x", "max_output_tokens": 1},
}
NO_SALTS: list[Any] = ["", "x" * 257, 5, True, ["x"], {"x": 1}]


@pytest_asyncio.fixture
async def keyed(tiny_tokenizer, tiny_model, tmp_path) -> AsyncIterator[Served]:
    keys = tmp_path / "keys"
    keys.write_text("a key-a\nb key-b\n")
    rig = Rig()
    await rig.connect()
    made = Served(rig, tiny_tokenizer, tiny_model, read_tenants(str(keys)))
    yield made
    rig.assert_clean()
    await made.grammars.close()
    await rig.close()


@pytest.fixture
def app(keyed):
    return HttpFront(keyed.serving, BodyParser(), 1 << 20).app


@pytest_asyncio.fixture
async def http(app) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://t", timeout=LIMIT_S) as made:
        yield made


@pytest_asyncio.fixture
async def stub(keyed) -> AsyncIterator[Any]:
    server, _ = create_server(keyed.serving, BodyParser(), 5.0)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield client_pb2_grpc.TandemStub(channel)
    await server.stop(0)


def num_refused(served: Served) -> float:
    return served.metrics.unauthenticated.collect()[0].samples[0].value


async def finish(served: Served) -> bytes:
    """Have the one request fail where its prompt is to be computed; the salt that it came with."""
    start = await served.start()
    prefill = next(w for w in served.rig.prefill if w.record.worker_id == start.worker.worker_id)
    prefill.emit(failed={"handoff_id": start.handoff_id, "error": {"code": "engine_error", "message": "no"}})
    return start.cache_salt


@pytest.mark.parametrize(("method", "path"), KEYED)
@pytest.mark.parametrize("authorization", WRONG)
async def test_http_without_a_key_is_401_before_the_body_is_read(keyed, app, method, path, authorization):
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        raise AssertionError("the body was read")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"authorization", authorization.encode())] if authorization else []
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers}
    await app(scope, receive, send)
    assert sent[0]["status"] == 401
    assert dict(sent[0]["headers"])[b"www-authenticate"] == b"Bearer"
    error = json.loads(sent[1]["body"])["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert num_refused(keyed) == 1
    assert keyed.outcomes() == {}


async def test_what_needs_a_key_is_everything_but_what_operators_look_at(app):
    paths = {route.path for route in app.routes}
    closed = {"/v1/models/{model:path}" if path == "/v1/models/m" else path for _, path in KEYED}
    assert closed <= paths
    assert not [path for path in paths - closed if path.startswith("/v1")]
    assert {path for path in paths - closed if not path.startswith("/page")} == set(OPEN) - {"/page/app.js"}


@pytest.mark.parametrize("path", OPEN)
async def test_what_operators_look_at_is_open(http, keyed, path):
    assert (await http.get(path)).status_code == 200
    assert num_refused(keyed) == 0


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m"])
async def test_with_a_key_it_is_as_without_keys(http, path):
    assert (await http.get(path, headers=KEY_A)).status_code == 200


@pytest.mark.parametrize(("path", "body"), BODIES.items())
@pytest.mark.parametrize("salt", NO_SALTS, ids=lambda salt: str(salt)[:8])
async def test_what_is_no_salt_is_a_400_that_names_it(http, path, body, salt):
    answer = await http.post(path, json={**body, "cache_salt": salt}, headers=KEY_A)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "cache_salt"


@pytest.mark.parametrize(("path", "body"), BODIES.items())
@pytest.mark.parametrize("salt", [None, "s", "é" * 256])
async def test_the_salt_of_an_http_request_is_its_tenants(keyed, http, path, body, salt):
    asked = asyncio.create_task(http.post(path, json={**body, "cache_salt": salt}, headers=KEY_A))
    assert await finish(keyed) == cache_salt("a", salt or "")
    assert (await asked).status_code == 500


@pytest.mark.parametrize("authorization", WRONG)
@pytest.mark.parametrize(
    ("call", "request_"),
    [
        ("Generate", pb.GenerateRequest(text="x")),
        ("GenerateStream", pb.GenerateRequest(text="x")),
        ("ResumeStream", pb.ResumeStreamRequest(resume_token="x")),
        ("AbortRequest", pb.AbortRequestRequest(request_id="x")),
        ("GetModel", pb.GetModelRequest()),
    ],
)
async def test_grpc_without_a_key_is_unauthenticated(keyed, stub, call, request_, authorization):
    metadata = (("authorization", authorization),) if authorization else ()
    begun = getattr(stub, call)(request_, metadata=metadata, timeout=LIMIT_S)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (begun.read() if call.endswith("Stream") else begun)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert ("tandem-code", "invalid_api_key") in map(tuple, caught.value.trailing_metadata())
    assert num_refused(keyed) == 1


@pytest.mark.parametrize("salt", ["", "x" * 257])
async def test_what_is_no_salt_is_an_invalid_argument(stub, salt):
    request = pb.GenerateRequest(text="x", cache_salt=salt)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(request, metadata=tuple(KEY_A.items()), timeout=LIMIT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert ("tandem-field", "cache_salt") in map(tuple, caught.value.trailing_metadata())


@pytest.mark.parametrize("key", ["a", "b"])
async def test_the_salt_of_a_grpc_request_is_its_tenants(keyed, stub, key):
    metadata = (("authorization", f"Bearer key-{key}"),)
    request = pb.GenerateRequest(text="x", cache_salt="s")
    asked = asyncio.ensure_future(stub.Generate(request, metadata=metadata, timeout=LIMIT_S))
    assert await finish(keyed) == cache_salt(key, "s")
    with pytest.raises(grpc.aio.AioRpcError):
        await asked


async def test_a_running_request_of_another_tenant_is_as_unknown_as_one_that_never_was(keyed, stub):
    mine, yours = ((("authorization", f"Bearer key-{key}"),) for key in "ab")
    request = pb.GenerateRequest(text="x", client_request_id="mine", resumable=True)
    call = stub.GenerateStream(request, metadata=mine, timeout=LIMIT_S)
    opening = await call.read()
    start = await keyed.start()
    for name in ("mine", opening.request_id, "never"):
        asked = pb.AbortRequestRequest(request_id=name)
        assert await stub.AbortRequest(asked, metadata=yours) == pb.AbortRequestResponse()
    errors = set()
    for token in (opening.resume_token, "never"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ResumeStream(pb.ResumeStreamRequest(resume_token=token), metadata=yours).read()
        errors.add((caught.value.code(), caught.value.details()))
    assert len(errors) == 1
    assert errors.pop()[0] is grpc.StatusCode.NOT_FOUND
    asked = pb.AbortRequestRequest(request_id="mine")
    assert (await stub.AbortRequest(asked, metadata=mine)).was_running
    with pytest.raises(grpc.aio.AioRpcError, match="aborted"):
        await call.read()
    prefill = next(w for w in keyed.rig.prefill if w.record.worker_id == start.worker.worker_id)
    await prefill.take("abort")
