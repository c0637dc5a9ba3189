"""Prefixes moved between real workers, as a gateway has it done."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from core.ids import HandoffId, RequestId
from core.sampling import SamplingParams
from core.worker import Role, WorkerRecord
from gateway.generation import GenerationRequest
from gateway.routing.pulls import PULLS, Pulls
from gateway.routing.router import Pull
from tests.kv_cache.rig import CHAIN, NUM_BLOCKS, SPEC, Worker

REQUEST = GenerationRequest((1,) * 200, SamplingParams(max_tokens=8), tuple(CHAIN[:12]))


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[tuple[Worker, Worker]]:
    source, target = Worker("source"), Worker("the target")
    await source.start()
    await target.start()
    source.hold(CHAIN[:10])
    yield source, target
    for worker in (source, target):
        await worker.wait_idle()
        await worker.close()


def record_of(worker: Worker) -> WorkerRecord:
    identity = worker.identity
    address = f"127.0.0.1:{worker.port}"
    return WorkerRecord(
        identity.worker_id, identity.epoch, Role.PREFILL, address, "m", SPEC, 4096, 300, NUM_BLOCKS, 8
    )


def attempt(number: int) -> HandoffId:
    return HandoffId(RequestId("r"), number)


def moved() -> float:
    return PULLS.labels(outcome="moved")._value.get()


async def test_each_attempt_of_a_request_can_have_its_prefix_moved(pair: tuple[Worker, Worker]):
    source, target = pair
    pulls, pull = Pulls(), Pull(record_of(source), 160)
    for number in (1, 2):
        assert await pulls.settle(record_of(target), attempt(number), REQUEST, pull)
        await target.wait_idle()
        target.check(10)
        target.pool.clear_cache()


async def test_those_that_share_what_is_on_its_way_wait_for_it(pair: tuple[Worker, Worker]):
    source, target = pair
    pulls, pull, before = Pulls(), Pull(record_of(source), 160), moved()
    settling = [
        asyncio.create_task(pulls.settle(record_of(target), attempt(number), REQUEST, wanted))
        for number, wanted in enumerate((pull, pull, None))
    ]
    await asyncio.sleep(0)
    assert pulls.is_moving(record_of(target))
    settling[0].cancel()  # its client has gone: the others still wait
    assert await asyncio.gather(*settling[1:]) == [True, True]
    assert moved() == before + 1
    assert not pulls.is_moving(record_of(target))
    await target.wait_idle()
    target.check(10)


@pytest.mark.parametrize("gone", ["source", "the target"])
async def test_a_worker_that_is_gone_costs_a_computation(pair: tuple[Worker, Worker], gone: str):
    source, target = pair
    worker = source if gone == "source" else target
    await worker.server.stop(None)
    assert not await Pulls().settle(record_of(target), attempt(1), REQUEST, Pull(record_of(source), 160))


async def test_what_the_source_has_lost_is_not_moved(pair: tuple[Worker, Worker]):
    source, target = pair
    assert not await Pulls().settle(record_of(target), attempt(1), REQUEST, Pull(record_of(source), 176))
    await target.wait_idle()
    target.check(0)


async def test_a_gateway_that_stops_leaves_nothing_on_its_way(pair: tuple[Worker, Worker]):
    source, target = pair
    pulls = Pulls()
    settling = asyncio.create_task(
        pulls.settle(record_of(target), attempt(1), REQUEST, Pull(record_of(source), 160))
    )
    await asyncio.sleep(0.002)
    await pulls.close()
    await asyncio.wait([settling])
    await target.wait_idle()
