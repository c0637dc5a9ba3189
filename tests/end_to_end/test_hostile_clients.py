"""Clients that are hasty, huge, or never quiet, through both doors of one cluster."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator

import grpc
import httpx
import pytest
import pytest_asyncio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from core.worker import Role
from tandem.testing import LocalCluster
from tests.end_to_end.clients import Client, assert_well, make_request, read_counter

pytestmark = pytest.mark.asyncio(loop_scope="module")
rng = random.Random(72)
MILLION = 1_200_000
PINGING = (
    ("grpc.keepalive_time_ms", 1_200),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
PINGS_TOLD_OFF_S = 4.5  # a server that allows none breaks the connection at the third


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(start_cluster) -> AsyncIterator[LocalCluster]:
    async with start_cluster() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster, connect) -> AsyncIterator[Client]:
    async with connect(cluster) as made:
        yield made


async def status_of(work) -> grpc.StatusCode | None:
    try:
        await work
    except grpc.aio.AioRpcError as error:
        return error.code()
    return None


async def test_streams_with_a_tenth_of_a_second_each_leave_nothing_behind(cluster, client, oracle):
    prompts = [[rng.randrange(256) for _ in range(100)] for _ in range(64)]
    hasty = [status_of(client.generate(prompt, 400, deadline_s=0.1, ignore_eos=True)) for prompt in prompts]
    ends = Counter(await asyncio.gather(*hasty))
    refused = ends.pop(grpc.StatusCode.RESOURCE_EXHAUSTED, 0)  # more than the tier holds twice at a time
    assert set(ends) == {grpc.StatusCode.DEADLINE_EXCEEDED}
    assert refused < len(prompts) - 16
    await cluster.wait_idle(timeout_s=3)
    await assert_well(cluster, oracle)


async def test_a_stream_cancelled_in_its_middle_frees_its_blocks_at_once(cluster, client, oracle):
    call = client.stub.GenerateStream(make_request(range(90), 1500, ignore_eos=True))
    for _ in range(3):
        assert (await call.read()).choice.token_ids
    assert call.cancel()
    await cluster.wait_idle(timeout_s=3)
    await assert_well(cluster, oracle)


async def test_a_prompt_of_more_than_a_million_tokens_is_refused_by_its_length(cluster, client, oracle):
    before = await read_counter(cluster, "tandem_retries_total")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.generate([7] * MILLION)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"token_ids: the prompt has {MILLION} tokens" in caught.value.details()
    async with httpx.AsyncClient(base_url=cluster.http, timeout=30) as http:
        answer = await http.post("/v1/completions", json={"model": "test", "prompt": [7] * MILLION})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert await read_counter(cluster, "tandem_retries_total") == before
    await assert_well(cluster, oracle)


async def test_a_message_beyond_the_limit_is_refused_as_too_large(cluster, client, oracle):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.generate([2**31] * 4_000_000)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in caught.value.details()
    async with httpx.AsyncClient(base_url=cluster.http, timeout=30) as http:
        raw = json.dumps({"model": "test", "prompt": [10**9] * MILLION}).encode()
        assert (await http.post("/v1/completions", content=raw)).status_code == 413
    await assert_well(cluster, oracle)


async def watch_health(channel: grpc.aio.Channel) -> None:
    """A stream on which nothing comes for as long as the server is well."""
    call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    async for _ in call:
        pass


async def test_a_server_without_a_ping_policy_breaks_the_client_that_the_next_test_uses():
    server = grpc.aio.server()
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=PINGING) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="Too many pings"):
            await asyncio.wait_for(watch_health(channel), 2 * PINGS_TOLD_OFF_S)
    await server.stop(0)


async def test_a_client_that_pings_often_keeps_its_quiet_streams_and_its_idle_channel(cluster, oracle):
    slow = {"TANDEM_FAULTS": json.dumps({"delay_s": 1.6})}  # before each of three stages
    worker = await cluster.add_worker(Role.PREFILL, "a-slow-one", environment=slow)
    await cluster.wait_workers(["a-slow-one", "prefill-0", "decode-0"])
    prompt = [rng.randrange(256) for _ in range(60)]
    async with (
        grpc.aio.insecure_channel(cluster.grpc, options=PINGING) as quiet,
        grpc.aio.insecure_channel(cluster.grpc, options=PINGING) as idle,
    ):
        await idle.channel_ready()
        watching = asyncio.create_task(watch_health(quiet))
        change = asyncio.create_task(idle.wait_for_state_change(grpc.ChannelConnectivity.READY))
        answer = await Client(quiet).generate(prompt, 8, ignore_eos=True)
        assert answer.token_ids == oracle(prompt, max_tokens=8)
        assert answer.last.timing.prefill_worker_id == "a-slow-one"
        assert answer.last.timing.transfer_s > PINGS_TOLD_OFF_S
        assert not watching.done()
        assert not change.done()
        watching.cancel()
        change.cancel()
        await asyncio.gather(watching, change, return_exceptions=True)
    assert await worker.stop() == 0
    await cluster.wait_workers(["prefill-0", "decode-0"])
    await assert_well(cluster, oracle)


@pytest.mark.parametrize("given", ["x" * (1 << 20), "a\nINFO forged line", "a\x00b", "\u2028", "x" * 129])
async def test_a_client_id_that_is_no_name_is_refused(client, given):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.generate([1, 2, 3], 4, client_request_id=given)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith("client_request_id")


async def ask_raw(cluster: LocalCluster, header: bytes) -> bytes:
    """What comes back to one request with that header, byte for byte."""
    body = json.dumps({"model": "test", "prompt": [1, 2, 3], "max_tokens": 2}).encode()
    host, _, port = cluster.http.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: tandem\r\nConnection: close\r\n" + header
    writer.write(head + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    try:
        async with asyncio.timeout(20):
            return await reader.read()
    finally:
        writer.close()


async def test_a_request_id_header_that_is_no_name_is_cut_cleaned_or_refused(cluster, oracle):
    line_breaks = [b"a\nX-Forged: yes", b"a\r\n X-Forged: yes", b"a\rX-Forged: yes"]
    for given in (b"x" * (1 << 20), b"a\x01\x7f\xffb", b" " * 5000, *line_breaks):
        answer = await ask_raw(cluster, b"X-Request-Id: " + given)
        head = answer.partition(b"\r\n\r\n")[0].lower()
        assert head.split()[1] in (b"200", b"400", b"431"), head[:200]
        assert not [line for line in head.split(b"\r\n") if line.startswith(b"x-forged")]
        echoed = [line for line in head.split(b"\r\n") if line.startswith(b"x-request-id:")]
        assert all(len(line) <= 150 and line.isascii() and line.decode().isprintable() for line in echoed)
    await assert_well(cluster, oracle)
