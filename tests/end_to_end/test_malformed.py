"""Malformed requests through both doors of one cluster: each gets its proper refusal or a proper answer, nobody else
notices. A few hundred in `make test`; the soak test sends ten thousand with the same code."""

import asyncio
import contextlib
import json
import socket
import statistics
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, Phase, given, settings

from tandem.testing import LocalCluster
from tests.end_to_end import malformed
from tests.end_to_end.clients import LAST_PROMPT, Client, assert_well
from tests.end_to_end.malformed import Attack

pytestmark = pytest.mark.asyncio(loop_scope="module")
POLLER = Path(__file__).with_name("health_times.py")
QUIET_S = 2.0
ANSWER_LIMIT_S = 60.0
RAW_LIMIT_S = 1.0
MAX_MESSAGE_LEN = 2000
IN_ORDER = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(start_cluster) -> AsyncIterator[LocalCluster]:
    async with start_cluster() as running:
        yield running


class Siege:
    """A cluster under attack, and what it answered."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.statuses: Counter[str] = Counter()
        self.slowest: tuple[float, str] = (0.0, "")
        self._host, _, port = cluster.http.removeprefix("http://").partition(":")
        self._port = int(port)
        self._http = cluster.http
        self._grpc = cluster.grpc

    @contextmanager
    def connected(self) -> Iterator[Callable[[Attack], None]]:
        with httpx.Client(base_url=self._http, timeout=ANSWER_LIMIT_S) as http:
            yield lambda attack: self._send(http, attack)

    def _send(self, http: httpx.Client, attack: Attack) -> None:
        headers = {"content-type": attack.content_type.encode("latin-1")}
        url = httpx.URL(self._http).copy_with(raw_path=attack.path.encode("latin-1"))
        answer = http.request(attack.method, url, content=attack.body, headers=headers)
        told = f"{attack.method} {attack.path} {attack.body[:120]!r} {answer.status_code}"
        self.slowest = max(self.slowest, (answer.elapsed.total_seconds(), told))
        self.statuses[f"http {answer.status_code}"] += 1
        assert answer.status_code // 100 in (2, 4), (answer.status_code, answer.text[:500])
        if answer.status_code >= 400:
            check_error(answer)

    def send_raw(self, raw: bytes) -> None:
        """What no client library would: it is answered, the connection ends, or the server waits for the rest."""
        with closing(socket.create_connection((self._host, self._port), RAW_LIMIT_S)) as connection:
            answer = b""
            with contextlib.suppress(ConnectionError, TimeoutError):
                connection.sendall(raw)
                while part := connection.recv(1 << 16):
                    answer += part
        status = answer.split()[1].decode() if answer else "none"
        self.statuses[f"raw {status}"] += 1
        assert not status.startswith("5"), answer[:500]

    @contextmanager
    def called(self) -> Iterator[Callable[[bytes, str], None]]:
        with grpc.insecure_channel(self._grpc) as channel:
            yield lambda raw, method: self._call(channel, raw, method)

    def _call(self, channel: grpc.Channel, raw: bytes, method: str) -> None:
        make = channel.unary_stream if method.endswith("Stream") else channel.unary_unary
        code, details = grpc.StatusCode.OK, ""
        try:
            answer = make(f"/tandem.v1.Tandem/{method}")(raw, timeout=ANSWER_LIMIT_S)
            list(answer) if method.endswith("Stream") else answer
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
        self.statuses[f"grpc {code.name}"] += 1
        assert code in IN_ORDER, (method, code, details)
        assert len(details) < MAX_MESSAGE_LEN


def check_error(answer: httpx.Response) -> None:
    """OpenAI's error body, which names the field and repeats no huge input."""
    if answer.request.method == "HEAD":
        return
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) < MAX_MESSAGE_LEN, error["message"][:200]
    assert error["param"] or answer.status_code != 400, error


def all_generated(siege: Siege, num_bodies: int, num_messages: int, is_repeatable: bool) -> None:
    options = settings(
        database=None,
        derandomize=is_repeatable,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with siege.connected() as send, siege.called() as call:
        settings(options, max_examples=num_bodies)(given(malformed.bodies())(send))()
        settings(options, max_examples=num_messages)(
            given(malformed.messages())(lambda raw: (call(raw, "Generate"), call(raw, "GenerateStream"))[0])
        )()
        for method in ("AbortRequest", "ResumeStream", "GetModel"):
            for raw in (b"", b"\xff" * 9, b"\x0a\xff", b"\x0a\x03a\xffb", b"\x08\x01" * 1000):
                call(raw, method)


def all_sent(siege: Siege, attacks: Sequence[Attack]) -> None:
    with siege.connected() as send:
        for attack in attacks:
            send(attack)


def all_raw(siege: Siege, times: int) -> None:
    for raw in malformed.RAW * times:
        siege.send_raw(raw)


@asynccontextmanager
async def health_times(cluster: LocalCluster) -> AsyncIterator[list[float]]:
    """Seconds that /health took, sorted, once the block is left. Raises AssertionError if it was ever not well."""
    host, _, port = cluster.http.removeprefix("http://").partition(":")
    pipe = asyncio.subprocess.PIPE
    poller = await asyncio.create_subprocess_exec(
        sys.executable, str(POLLER), host, port, stdin=pipe, stdout=pipe
    )
    took_s: list[float] = []
    try:
        yield took_s
    finally:
        told, _ = await poller.communicate(b"")
    assert poller.returncode == 0
    took_s += sorted(json.loads(told))


class Control:
    """The same request again and again while others attack: its tokens never change. That it may be told to wait is
    counted."""

    def __init__(self, cluster: LocalCluster, expected: list[int]) -> None:
        self.num_answers = self.num_busy = 0
        self._cluster = cluster
        self._expected = expected

    async def run(self) -> None:
        async with grpc.aio.insecure_channel(self._cluster.grpc) as channel:
            while True:
                try:
                    answer = await Client(channel).generate(LAST_PROMPT, 8, ignore_eos=True)
                    assert answer.token_ids == self._expected
                    self.num_answers += 1
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                        raise
                    self.num_busy += 1
                await asyncio.sleep(0.05)


async def besieged(cluster: LocalCluster, oracle: Any, works: Sequence[Callable[[Siege], None]]) -> Siege:
    """`works` at the same time, each in a thread, with /health watched and a control request that goes on."""
    async with health_times(cluster) as quiet_s:
        await asyncio.sleep(QUIET_S)
    siege, control = Siege(cluster), Control(cluster, oracle(LAST_PROMPT, max_tokens=8))
    controlling = asyncio.create_task(control.run())
    async with health_times(cluster) as took_s:
        attacking = asyncio.gather(*(asyncio.to_thread(work, siege) for work in works))
        await asyncio.wait([controlling, attacking], return_when=asyncio.FIRST_COMPLETED)
        controlling.cancel()
        await attacking
    with contextlib.suppress(asyncio.CancelledError):
        await controlling
    await assert_well(cluster, oracle, idle_within_s=30)
    report(siege, control, quiet_s, took_s)
    assert control.num_answers
    usual_s = statistics.median(quiet_s)
    assert statistics.median(took_s) < 50 * usual_s
    assert took_s[-1] < 5000 * usual_s, "sessions would break"
    return siege


def report(siege: Siege, control: Control, quiet_s: Sequence[float], took_s: Sequence[float]) -> None:
    def told(times_s: Sequence[float]) -> str:
        p50, p99 = statistics.median(times_s), times_s[int(len(times_s) * 0.99)]
        return f"p50 {p50 * 1e3:.1f}, p99 {p99 * 1e3:.1f}, worst {times_s[-1] * 1e3:.1f} ms of {len(times_s)}"

    sys.stderr.write(
        f"\n{sum(siege.statuses.values())} requests: {dict(sorted(siege.statuses.items()))}\n"
        f"the slowest took {siege.slowest[0]:.2f} s: {siege.slowest[1]}\n"
        f"control: {control.num_answers} answers, {control.num_busy} times busy\n"
        f"/health without an attack: {told(quiet_s)}\n/health during it: {told(took_s)}\n"
    )


async def test_some_hundred_malformed_requests_are_refused_and_hold_nobody_up(cluster, oracle):
    works = [
        lambda siege: all_generated(siege, 150, 60, is_repeatable=True),
        lambda siege: all_sent(siege, list(islice(malformed.hostile(), 0, None, 2))),
        lambda siege: all_raw(siege, 1),
    ]
    siege = await besieged(cluster, oracle, works)
    assert sum(siege.statuses.values()) > 400


async def test_huge_bodies_hold_nobody_up(cluster, oracle):
    picked = [attack for index, attack in enumerate(malformed.huge()) if index in (0, 1, 4, 7, 13, 14)]
    await besieged(cluster, oracle, [lambda siege: all_sent(siege, picked)])


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_ten_thousand_malformed_requests(cluster, oracle):
    works = [
        lambda siege: all_generated(siege, 3500, 600, is_repeatable=False),
        lambda siege: all_generated(siege, 3500, 600, is_repeatable=False),
        lambda siege: all_sent(siege, [*malformed.hostile()] * 2),
        lambda siege: (all_raw(siege, 10), all_sent(siege, [*malformed.huge()] * 2))[0],
    ]
    siege = await besieged(cluster, oracle, works)
    assert sum(siege.statuses.values()) >= 10_000
