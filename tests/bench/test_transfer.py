"""`tandem bench transfer`: bytes arrive, figures belong together. None is compared with a time."""

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from bench import transfer_limits
from bench.transfer import OWN_BENCHMARKS, SIZES, Pair, Plan, here
from bench.transfer_peer import fill
from core.errors import StaleEpoch
from core.kv_region import KVRegion
from kv_transfer.loopback import LoopbackNetwork
from tandem.cli import main

PLAN = Plan((4096, 65536), here())
KEYS = {"num_bytes", "num_blocks", "num_repeats", "transfer_s", "memcpy_s", "own_s"}


def pool(region):
    with memoryview(region.memory) as memory:
        return np.frombuffer(bytes(memory), np.uint8).reshape(region.num_blocks, -1)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """The JSON, the page and what was printed."""
    folder = tmp_path_factory.mktemp("transfer")
    paths = ["--json", str(folder / "a.json"), "--html", str(folder / "a.html")]
    result = CliRunner().invoke(main, ["bench", "transfer", "--sizes", "4k,64k", *paths])
    assert result.exit_code == 0, result.output
    return json.loads((folder / "a.json").read_text()), (folder / "a.html").read_text(), result.output


@pytest.mark.parametrize("connector", here())
async def test_the_bytes_arrive_each_time_although_they_were_there_before(connector):
    pair = Pair(PLAN, connector, LoopbackNetwork())
    source = KVRegion.create(pair.wiring.spec.block_bytes, pair.wiring.num_blocks)
    fill(source)
    async with pair.connected():
        await pair.transfer(pair.wiring.num_blocks)
        assert (pool(pair.region) == pool(source)).all()
        pair._spoil(pair.wiring.num_blocks)
        assert (pool(pair.region) != pool(source)).any(axis=1).all(), "old bytes of a block would pass"
        await pair.transfer(1)
        assert (pool(pair.region) == pool(source)).all(axis=1).tolist() == [True] + [False] * 15
    source.close()


async def test_what_the_sending_process_meets_is_raised_here():
    pair = Pair(PLAN, "shm", LoopbackNetwork())
    async with pair.connected():
        grant = pair._grant(1)
        with pytest.raises(StaleEpoch):
            await pair._send(replace(grant, epoch=grant.epoch + 1))
        await pair.transfer(1)


def test_every_connector_has_every_size(told):
    found, page, output = told
    assert (found["sizes"], found["block_bytes"]) == ([4096, 65536], 4096)
    assert tuple(found["connectors"]) == here()
    for name, rows in found["connectors"].items():
        assert [(row["num_bytes"], row["num_blocks"]) for row in rows] == [(4096, 1), (65536, 16)]
        assert name in page and name in output
        for row in rows:
            assert set(row) == KEYS | {"bytes_per_s", "to_memcpy", "to_own"}
            assert row["num_repeats"] >= transfer_limits.MIN_REPEATS
    assert "<svg" in page


def test_ratios_are_those_of_the_times(told):
    found, _, _ = told
    for name, rows in found["connectors"].items():
        for row in rows:
            assert row["bytes_per_s"] * row["transfer_s"] == pytest.approx(row["num_bytes"])
            assert row["to_memcpy"] == pytest.approx(row["memcpy_s"] / row["transfer_s"])
            assert (row["own_s"] is not None) == (name in OWN_BENCHMARKS)
            if row["own_s"] is not None:
                assert row["to_own"] == pytest.approx(row["own_s"] / row["transfer_s"])


def test_a_size_is_repeated_for_a_while_but_not_for_ever():
    assert not transfer_limits.is_enough([5.0, 5.0])
    assert transfer_limits.is_enough([5.0, 5.0, 5.0])
    assert not transfer_limits.is_enough([1e-6] * 999)
    assert transfer_limits.is_enough([1e-6] * 1000)


def test_words_for_sizes():
    assert Plan.read("", "") == Plan(SIZES, here())
    assert Plan.read("1m,4K, 65536", "tcp").sizes == (4096, 65536, 1 << 20)
    assert (SIZES[0], SIZES[-1], len(SIZES)) == (4096, 256 << 20, 9)
    assert Plan((4096,), ()).spec.block_bytes == 4096


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--sizes", "4k,x"], "--sizes: bytes, with commas between, as 4096,64k,1m: got 'x'"),
        (["--sizes", "4k,5k"], "--sizes: the smallest must be a multiple of 64 bytes and the others of that"),
        (["--sizes", "0"], "--sizes: the smallest must"),
        (["--sizes", "100"], "--sizes: the smallest must"),
        (["--connectors", "pigeon"], "--connectors: pigeon is not here; loopback, shm, tcp"),
    ],
)
def test_a_mistake_is_one_line(options, reason):
    result = CliRunner().invoke(main, ["bench", "transfer", *options])
    assert result.exit_code == 2
    assert result.stderr.startswith("tandem: ") and reason in result.stderr
    assert result.stderr.count("\n") == 1
