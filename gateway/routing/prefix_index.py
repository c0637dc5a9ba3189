"""What routing asks about prefixes, and what it learns from the answers: the mirror, fed from Redis, corrected by
what workers turn out to have cached."""

import asyncio
from collections.abc import Sequence

from prometheus_client import Counter, Gauge

from cluster.block_feed import BlockFeed
from cluster.block_index import BlockIndex
from cluster.store import Store
from core.block_hash import HASH_BLOCK_TOKENS, pool_chain
from core.ids import BlockHash, Epoch
from core.worker import WorkerRecord
from gateway.routing.prefix_mirror import Expectation, PrefixMirror

EXPECT_S = 0.5
"""From a prompt's first token until its worker's events have come: it gathers them, and the mirror reads now and
then."""

LOOKUPS = Counter("tandem_prefix_lookups", "Prompts whose prefix was looked up, by where.", ["source"])
PREDICTED = Counter("tandem_prefix_predicted_tokens", "Prompt tokens believed cached where they were sent.")
ERRORS = Counter(
    "tandem_prefix_index_error_tokens",
    "Prompt tokens that the index was wrong about where they were sent: missing there, or unexpectedly found.",
    ["kind"],
)
BLOCKS = Gauge("tandem_prefix_index_blocks", "Blocks that this gateway's mirror of the index knows.")
FORGOTTEN = Gauge("tandem_prefix_index_forgotten", "Blocks that the mirror had no room for since its start.")


class PrefixIndex:
    """One per gateway; `run()` keeps it up to date."""

    def __init__(self, store: Store, mirror: PrefixMirror | None = None) -> None:
        self.mirror = mirror or PrefixMirror()
        self._rows = BlockIndex(store)
        self._feed = BlockFeed(store, self._rows, self.mirror)
        self.run = self._feed.run
        BLOCKS.set_function(lambda: self.mirror.num_blocks)
        FORGOTTEN.set_function(lambda: self.mirror.num_forgotten)

    def follow(self, record: WorkerRecord) -> None:
        """Its blocks count from now on."""
        self._feed.follow(*record.key)

    async def leave(self, record: WorkerRecord) -> None:
        """That incarnation is gone, with all it held."""
        await self._feed.leave(record.epoch)
        await self._rows.drop(*record.key)

    async def overlap(self, chain: Sequence[BlockHash], block_size: int) -> dict[Epoch, int]:
        """Leading hash blocks of `chain` that each worker is believed to hold, whole blocks of their pools only. A
        mirror that has not heard of everybody yet leaves the question to Redis."""
        blocks = pool_chain(chain, block_size)
        depths = self.mirror.longest_prefix(blocks)
        LOOKUPS.labels(source="mirror" if self._feed.is_whole else "redis").inc()
        if not self._feed.is_whole:
            for epoch, depth in (await self._rows.longest_prefix(blocks)).items():
                depths[epoch] = max(depth, depths.get(epoch, 0))
        return _in_hash_blocks(depths, block_size)

    def held(self, chain: Sequence[BlockHash], block_size: int) -> dict[Epoch, int]:
        """The same, but for what is only about to be there: what can be moved elsewhere now."""
        return _in_hash_blocks(self.mirror.longest_prefix(pool_chain(chain, block_size), True), block_size)

    def expect(self, record: WorkerRecord, chain: Sequence[BlockHash]) -> Expectation:
        """It was sent the prompt. The caller says when that is over, by settle()."""
        return self.mirror.expect(record.epoch, pool_chain(chain, record.kv_spec.block_size))

    def settle(self, expectation: Expectation) -> None:
        """The prompt is computed, or never will be: soon the worker will have told what it holds of it."""
        asyncio.get_running_loop().call_later(EXPECT_S, self.mirror.end, expectation)

    def observe(
        self,
        record: WorkerRecord,
        chain: Sequence[BlockHash],
        num_predicted: int,
        num_cached: int,
        num_tokens: int,
    ) -> None:
        """A worker that was believed to have `num_predicted` tokens of a prompt of `num_tokens` had `num_cached`."""
        block_size = record.kv_spec.block_size
        usable = (num_tokens - 1) // block_size  # the last token is always computed, and the block it is in
        num_predicted = min(num_predicted, usable * block_size)
        PREDICTED.inc(num_predicted)
        error = num_cached - num_predicted
        if error:
            ERRORS.labels(kind="missing" if error < 0 else "unexpected").inc(abs(error))
        blocks = pool_chain(chain, block_size)[:usable]
        self.mirror.correct(record.epoch, blocks, num_predicted // block_size, num_cached // block_size)


def _in_hash_blocks(depths: dict[Epoch, int], block_size: int) -> dict[Epoch, int]:
    return {epoch: depth * block_size // HASH_BLOCK_TOKENS for epoch, depth in depths.items()}
