"""What the index of blocks costs: `python -m bench.prefix_index`.

Workers' publishers write the same blocks into a Redis of their own, one after the other: bytes there for a block's
first holder and for a further one, all keys counted but the stream of events, which is as long as it is. Then a
mirror with as many blocks: its bytes a block, and how long it takes for the longest prefix of a chain.
"""

import argparse
import asyncio
import random
import time
import tracemalloc
from itertools import pairwise

from click import echo

from cluster.block_index import BlockPublisher
from cluster.store import Store
from cluster.valkey import EmbeddedValkey
from core.block_hash import HASH_BYTES
from core.ids import BlockHash, Epoch, WorkerId
from gateway.routing.prefix_mirror import PrefixMirror


async def redis_bytes(hashes: list[BlockHash], num_holders: int) -> list[float]:
    """For each holder in turn, bytes a block that its publication took."""
    valkey = await EmbeddedValkey.start()
    store = Store(valkey.url)
    try:
        used = [await _used(store)]
        for number in range(num_holders):
            publisher = BlockPublisher(
                store, WorkerId(f"worker-{number}"), Epoch(number + 1), max_pending=len(hashes)
            )
            for block_hash in hashes:
                publisher.note(True, block_hash)
            while publisher._pending:
                await publisher._publish_batch()
            used.append(await _used(store))
    finally:
        await store.close()
        await valkey.stop()
    return [(after - before) / len(hashes) for before, after in pairwise(used)]


async def _used(store: Store) -> int:
    """The stream is emptied first: its bytes do not grow with the number of blocks."""
    await store.redis.delete(store.keys.events)
    used: int = (await store.redis.info("memory"))["used_memory"]
    return used


def mirror_figures(hashes: list[BlockHash], chain_len: int, num_workers: int) -> tuple[float, float]:
    """Bytes a block with one holder, its hash included, and seconds for the longest prefix of a chain that every
    worker holds a part of."""
    tracemalloc.start()
    mirror = PrefixMirror(max_blocks=2 * len(hashes))
    for number in range(num_workers):
        mirror.add(Epoch(number + 1))
    mirror.store(Epoch(1), (BlockHash(bytes(bytearray(block_hash))) for block_hash in hashes))
    used = tracemalloc.get_traced_memory()[0] / len(hashes)
    tracemalloc.stop()
    chain = hashes[:chain_len]
    for number in range(num_workers):
        mirror.store(Epoch(number + 1), chain[: chain_len - number % chain_len])
    times = []
    for _ in range(50):
        began_s = time.perf_counter()
        mirror.longest_prefix(chain)
        times.append(time.perf_counter() - began_s)
    return used, sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--holders", type=int, default=2)
    parser.add_argument("--chain", type=int, default=500)
    parser.add_argument("--workers", type=int, default=100)
    asked = parser.parse_args()
    rng = random.Random(1)
    hashes = [BlockHash(rng.randbytes(HASH_BYTES)) for _ in range(asked.blocks)]
    first, *further = asyncio.run(redis_bytes(hashes, asked.holders))
    echo(f"{asked.blocks} blocks in Redis: {first:.0f} bytes each for a first holder")
    for number, used in enumerate(further, 2):
        echo(f"  {used:.0f} for holder {number}")
    used, lookup_s = mirror_figures(hashes, asked.chain, asked.workers)
    echo(f"in a gateway's mirror: {used:.0f} bytes each with one holder")
    echo(f"longest prefix of {asked.chain} blocks among {asked.workers} workers: {1e6 * lookup_s:.0f} us")


if __name__ == "__main__":
    main()
