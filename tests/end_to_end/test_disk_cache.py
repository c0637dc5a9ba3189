"""A disk below the prefix cache: what a worker has computed it has again after its restart, or computes it again."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from click.testing import CliRunner

from core.kv_spec import DType, KVSpec
from tandem.cli import main
from tandem.testing import LocalCluster
from tests.end_to_end.clients import Answer, Client, assert_well, read_counter

pytestmark = pytest.mark.asyncio(loop_scope="module")
rng = random.Random(23)
BLOCK = 16
NUM_BLOCKS = 20
HEADER_BYTES, PREFIX_BYTES = 40, 32
WORKERS = ["prefill-0", "decode-0"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk") / "made" / "for it"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(start_cluster, directory: Path) -> AsyncIterator[LocalCluster]:
    """No prefix is pulled from the decode worker: only the disk has what the prefill worker had."""
    async with start_cluster(
        prefill_arguments=("--disk-cache", str(directory)),
        decode_arguments=("--max-local-tokens", "0"),
        gateway_arguments=("--pull-cost", "inf"),
    ) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster, connect) -> AsyncIterator[Client]:
    async with connect(cluster) as made:
        yield made


def tokens(count: int) -> list[int]:
    return [rng.randrange(256) for _ in range(count)]


async def on_disk(cluster: LocalCluster) -> float:
    return await read_counter(cluster, "tandem_disk_cache_blocks")


async def wait_saved(cluster: LocalCluster, num_blocks: float) -> None:
    async with asyncio.timeout(10):
        while await on_disk(cluster) < num_blocks:
            await asyncio.sleep(0.05)


async def wait_read(cluster: LocalCluster) -> None:
    """Until the worker has told that it read one prompt's blocks, and no more."""
    async with asyncio.timeout(10):
        while not (num_read := await read_counter(cluster, "tandem_disk_cache_read_blocks_total")):
            await asyncio.sleep(0.05)
    assert num_read == NUM_BLOCKS


async def saved(cluster: LocalCluster, client: Client, **options: str) -> tuple[list[int], Answer]:
    """A prompt that was computed, once its blocks are on disk."""
    before = await on_disk(cluster)
    prompt = tokens(NUM_BLOCKS * BLOCK + 5)
    answer = await client.generate(prompt, 8, ignore_eos=True, **options)
    await wait_saved(cluster, before + NUM_BLOCKS)
    return prompt, answer


async def restart(cluster: LocalCluster, is_killed: bool) -> None:
    process = cluster.processes["prefill-0"]
    await (process.kill() if is_killed else process.stop())
    await process.start()
    epoch = {w["record"]["epoch"] for w in await cluster.workers() if w["record"]["worker_id"] == "prefill-0"}
    async with asyncio.timeout(60):
        while {w["record"]["epoch"] for w in await cluster.workers() if w["is_up"]} & epoch:
            await asyncio.sleep(0.05)
    await cluster.wait_workers(WORKERS)


def damage(directory: Path, block_bytes: int) -> None:
    """A byte of every block."""
    for path in files(directory):
        data = bytearray(path.read_bytes())
        for end in range(
            HEADER_BYTES + PREFIX_BYTES + block_bytes, len(data) + 1, PREFIX_BYTES + block_bytes
        ):
            data[end - 1] ^= 1
        path.write_bytes(data)


def files(directory: Path) -> list[Path]:
    return list(directory.glob("*.kv"))


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_restarted_worker_has_its_prefixes(cluster, client, oracle, is_killed: bool):
    prompt, first = await saved(cluster, client)
    assert first.usage.num_cached_tokens == 0
    await restart(cluster, is_killed)
    answer = await client.generate(prompt, 8, ignore_eos=True)
    assert answer.token_ids == first.token_ids == oracle(prompt, max_tokens=8)
    assert answer.usage.num_cached_tokens == NUM_BLOCKS * BLOCK
    await wait_read(cluster)
    await assert_well(cluster, oracle)


async def test_prompts_with_one_prefix_read_it_once(cluster, client, oracle):
    prompt, _ = await saved(cluster, client)
    await restart(cluster, is_killed=False)
    prompts = [prompt[: NUM_BLOCKS * BLOCK] + tokens(7) for _ in range(5)]
    answers = await asyncio.gather(*(client.generate(ids, 6, ignore_eos=True) for ids in prompts))
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == oracle(ids, max_tokens=6)
        assert answer.usage.num_cached_tokens == NUM_BLOCKS * BLOCK
    await wait_read(cluster)
    await assert_well(cluster, oracle)


async def test_what_was_saved_under_a_salt_is_found_under_that_only(cluster, client, oracle):
    prompt, first = await saved(cluster, client, cache_salt="a")
    await restart(cluster, is_killed=False)
    for salt, num_cached in (("b", 0), ("a", NUM_BLOCKS * BLOCK)):
        answer = await client.generate(prompt, 8, ignore_eos=True, cache_salt=salt)
        assert answer.token_ids == first.token_ids
        assert answer.usage.num_cached_tokens == num_cached
    await assert_well(cluster, oracle)


async def test_a_client_that_leaves_while_its_prefix_is_read_leaves_nothing(cluster, client, oracle):
    prompts = [(await saved(cluster, client))[0] for _ in range(3)]
    await restart(cluster, is_killed=False)
    for prompt in prompts:
        leaving = asyncio.create_task(client.generate(prompt, 8, ignore_eos=True))
        await asyncio.sleep(0.004)
        leaving.cancel()
        await asyncio.wait([leaving])
    await assert_well(cluster, oracle)


async def test_damaged_files_cost_a_computation_and_no_token(cluster, client, oracle, directory: Path):
    prompt, first = await saved(cluster, client)
    spec = (await cluster.workers())[0]["record"]["kv_spec"]
    block_bytes = KVSpec(**{**spec, "dtype": DType(spec["dtype"])}).block_bytes
    await cluster.processes["prefill-0"].stop()
    damage(directory, block_bytes)
    await restart(cluster, is_killed=True)
    answer = await client.generate(prompt, 8, ignore_eos=True)
    assert answer.token_ids == first.token_ids
    assert answer.usage.num_cached_tokens == 0
    async with asyncio.timeout(10):
        while not await read_counter(cluster, "tandem_disk_cache_bad_blocks_total"):
            await asyncio.sleep(0.05)
    await assert_well(cluster, oracle)


async def test_a_flush_empties_the_disk(cluster, client, oracle, directory: Path):
    prompt, _ = await saved(cluster, client)
    result = await asyncio.to_thread(CliRunner().invoke, main, ["flush", "--url", cluster.http])
    assert result.exit_code == 0
    async with asyncio.timeout(10):
        while await on_disk(cluster):
            await asyncio.sleep(0.05)
    assert files(directory) == []
    await restart(cluster, is_killed=False)
    answer = await client.generate(prompt, 8, ignore_eos=True)
    assert answer.usage.num_cached_tokens == 0
    await assert_well(cluster, oracle)


async def test_a_directory_of_another_worker_is_a_mistake(cluster, directory: Path):
    arguments = ["prefill", "--disk-cache", str(directory), "--redis-url", cluster.redis_url]
    result = await asyncio.to_thread(CliRunner().invoke, main, [*arguments, "--model", cluster.model])
    assert result.exit_code == 2
    assert "another worker's" in result.output
