"""Workers that are killed, one after the other and then a whole tier, and workers that do not belong: one cluster of
two and two, under load."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from cluster.registry import LEASE_S
from core.worker import Role
from engine.testing import make_tiny_model
from tandem.testing import LocalCluster
from tests.end_to_end.clients import Answer, Load, assert_well

pytestmark = pytest.mark.asyncio(loop_scope="module")
rng = random.Random(81)
NOTICED_S = 1.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(start_cluster) -> AsyncIterator[LocalCluster]:
    async with start_cluster(num_prefill=2, num_decode=2) as running:
        await running.wait_workers(["prefill-0", "prefill-1", "decode-0", "decode-1"])
        yield running


def new_prompt(_: int = 0) -> list[int]:
    return [rng.randrange(256) for _ in range(40)]


def workers_of(answers: list[Answer | BaseException]) -> set[str]:
    timings = [answer.last.timing for answer in answers if isinstance(answer, Answer)]
    return {name for timing in timings for name in (timing.prefill_worker_id, timing.decode_worker_id)}


async def test_workers_of_another_geometry_type_or_model_are_refused_and_never_asked(
    cluster, connect, oracle, tmp_path: Path
):
    other = make_tiny_model(tmp_path / "other", seed=1)
    misfits = {
        "a-size": (("--block-size", "32"), "block_size: 16 here, 32 there"),
        "a-type": (("--dtype", "bfloat16"), "dtype: float32 here, bfloat16 there"),
        "a-model": (("--model", str(other)), "fingerprint: "),
    }
    for name, (arguments, _) in misfits.items():
        await cluster.add_worker(Role.DECODE, name, arguments)
    gateway = cluster.processes["gateway"]
    async with asyncio.timeout(60):
        while not all(f"refused {name}, it does not fit" in gateway.tail(10_000) for name in misfits):
            await asyncio.sleep(0.1)
    async with connect(cluster) as client, Load(client, new_prompt, 4, 0.05) as load:
        await asyncio.sleep(1.5)
    load.assert_right(oracle)
    assert not workers_of(load.results) & set(misfits)
    lines = [line for line in gateway.log.read_text().splitlines() if "refused" in line]
    assert len(lines) == len(misfits), lines
    for name, (_, reason) in misfits.items():
        assert [line for line in lines if name in line and reason in line], lines
        await cluster.processes.pop(name).kill()
    await assert_well(cluster, oracle)


async def test_under_load_a_prefill_and_a_decode_worker_are_killed_and_no_request_fails(
    cluster, connect, oracle
):
    """The dead decode worker stays in Redis for its lease: nothing is routed to it, then or later."""
    async with connect(cluster) as client:
        async with Load(client, new_prompt, 40, 0.08) as load:
            await asyncio.sleep(1.5)
            await cluster.processes["prefill-0"].kill()
            await asyncio.sleep(1.5)
            await cluster.processes["decode-0"].kill()
            await asyncio.sleep(NOTICED_S)
            num_before = len(load.prompts)
            await asyncio.sleep(LEASE_S + 5 - NOTICED_S)
        load.assert_right(oracle)
    assert {"prefill-0", "decode-0"} <= workers_of(load.results[:10])
    assert workers_of(load.results[num_before:]) == {"prefill-1", "decode-1"}
    late = [answer.last.timing for answer in load.results[num_before:] if isinstance(answer, Answer)]
    assert {timing.num_attempts for timing in late} == {1}
    await assert_well(cluster, oracle)


async def test_with_the_last_prefill_worker_gone_the_gateway_is_alive_and_not_ready(cluster, connect, oracle):
    async def status(path: str) -> int:
        async with httpx.AsyncClient(base_url=cluster.http) as http:
            return (await http.get(path)).status_code

    statuses: set[int] = set()

    async def watch() -> None:
        while True:
            statuses.add(await status("/health"))
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())
    async with connect(cluster) as client, Load(client, new_prompt, 60, 0.05) as load:
        await asyncio.sleep(0.5)
        await cluster.processes["prefill-1"].kill()
        async with asyncio.timeout(5):
            while await status("/ready") != 503:
                await asyncio.sleep(0.02)
        await asyncio.sleep(1.0)
    load.assert_right(oracle)
    assert await status("/ready") == 503
    await cluster.add_worker(Role.PREFILL, "prefill-2")
    await cluster.wait_workers(["prefill-2", "decode-1"])
    assert await status("/ready") == 200
    watching.cancel()
    await asyncio.wait([watching])
    assert statuses == {200}
    await assert_well(cluster, oracle)
