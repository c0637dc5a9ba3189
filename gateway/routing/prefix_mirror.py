"""Which worker holds which block, as this gateway believes it: what the cluster's index says, in memory, so that
routing asks nobody. No I/O; the simulator runs the same code. A wrong belief costs a computation, never a token.

    hash ─► holders, a bit for each incarnation            told by workers, corrected by what they turn out to have
    hash ─► holders to be                                  prompts that were sent there and are not computed yet
"""

from collections.abc import Iterable, Iterator, Sequence

from core.ids import BlockHash, Epoch

NUM_SHARDS = 256
"""By a hash's first byte: what must look at every block does so in pieces of this many."""

MAX_BLOCKS = 2_000_000
"""About 90 bytes each with a single holder, the hash included."""


Sweep = Iterator[None]
"""Takes a slot that nobody has any more out of every row: iterate to its end, pausing between items at will. Until
then the slot is not given to anybody else."""


class Expectation:
    """Blocks that a worker will hold once it has computed a prompt. Whoever made it ends it."""

    __slots__ = ("epoch", "hashes")

    def __init__(self, epoch: Epoch, hashes: Sequence[BlockHash]) -> None:
        self.epoch = epoch
        self.hashes = hashes


class PrefixMirror:
    """Holders are epochs that were `add`ed and not yet `remove`d; what is said of others is ignored. Beyond
    `max_blocks` the blocks heard of first are forgotten."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._shards: list[dict[BlockHash, int]] = [{} for _ in range(NUM_SHARDS)]
        self._max_in_shard = -(-max_blocks // NUM_SHARDS)
        self._slots: dict[Epoch, int] = {}
        self._epochs: dict[int, Epoch] = {}
        self._unused: list[int] = []
        self._num_slots = 0
        self._live = 0
        self._expected: dict[BlockHash, dict[Epoch, int]] = {}
        self.num_forgotten = 0

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self._shards))

    def add(self, epoch: Epoch) -> None:
        """It holds nothing yet."""
        if epoch not in self._slots:
            self._take_slot(epoch)

    def remove(self, epoch: Epoch) -> Sweep | None:
        """It holds nothing any more. The caller runs the sweep to its end, at its leisure."""
        slot = self._slots.pop(epoch, None)
        return self._retire(slot) if slot is not None else None

    def replace(self, epoch: Epoch, hashes: Iterable[BlockHash]) -> Sweep | None:
        """It holds exactly these: for one who lost count. The caller runs the sweep, as for remove()."""
        before = self._slots.get(epoch)
        if before is None:
            return None
        self._take_slot(epoch)
        self.store(epoch, hashes)
        return self._retire(before)

    def store(self, epoch: Epoch, hashes: Iterable[BlockHash]) -> None:
        bit, shards = self._bit(epoch), self._shards
        for block_hash in hashes if bit else ():
            shard = shards[block_hash[0]]
            shard[block_hash] = shard.get(block_hash, 0) | bit
            if len(shard) > self._max_in_shard:
                del shard[next(iter(shard))]
                self.num_forgotten += 1

    def discard(self, epoch: Epoch, hashes: Iterable[BlockHash]) -> None:
        bit = self._bit(epoch)
        for block_hash in hashes if bit else ():
            _clear(self._shards[block_hash[0]], block_hash, bit)

    def longest_prefix(self, chain: Sequence[BlockHash], is_there: bool = False) -> dict[Epoch, int]:
        """Leading blocks of `chain` that each holder has or is about to have (`is_there`: has); none but those with
        one at least."""
        depths: dict[Epoch, int] = {}
        holders, shards = self._live, self._shards
        expected = {} if is_there else self._expected
        for depth, block_hash in enumerate(chain):
            found = shards[block_hash[0]].get(block_hash, 0)
            if expected and block_hash in expected:
                found |= self._expected_bits(block_hash)
            found &= holders
            if found != holders:
                self._note_depth(depths, holders ^ found, depth)
                holders = found
                if not found:
                    return depths
        self._note_depth(depths, holders, len(chain))
        return depths

    def expect(self, epoch: Epoch, chain: Sequence[BlockHash]) -> Expectation:
        """It was sent a prompt with these blocks: who has the same prefix is to follow."""
        bit = self._bit(epoch)
        hashes = [h for h in chain if not self._shards[h[0]].get(h, 0) & bit]
        for block_hash in hashes:
            counts = self._expected.setdefault(block_hash, {})
            counts[epoch] = counts.get(epoch, 0) + 1
        return Expectation(epoch, hashes)

    def end(self, expectation: Expectation) -> None:
        """It has told of them itself by now, or never will. Idempotent."""
        hashes, expectation.hashes = expectation.hashes, ()
        for block_hash in hashes:
            counts = self._expected[block_hash]
            counts[expectation.epoch] -= 1
            if not counts[expectation.epoch]:
                del counts[expectation.epoch]
            if not counts:
                del self._expected[block_hash]

    def correct(self, epoch: Epoch, chain: Sequence[BlockHash], num_believed: int, num_held: int) -> None:
        """It was believed to hold the first `num_believed` blocks of `chain`, and held `num_held`. What was not
        believed then is left alone: it may have been computed and told of since."""
        self.discard(epoch, chain[num_held:num_believed])
        self.store(epoch, chain[num_believed:num_held])

    def _bit(self, epoch: Epoch) -> int:
        """0 for one that is not a holder."""
        slot = self._slots.get(epoch)
        return 1 << slot if slot is not None else 0

    def _expected_bits(self, block_hash: BlockHash) -> int:
        bits = 0
        for epoch in self._expected[block_hash]:
            bits |= self._bit(epoch)
        return bits

    def _note_depth(self, depths: dict[Epoch, int], holders: int, depth: int) -> None:
        while depth and holders:
            lowest = holders & -holders
            depths[self._epochs[lowest.bit_length() - 1]] = depth
            holders ^= lowest

    def _take_slot(self, epoch: Epoch) -> None:
        if not self._unused:
            self._unused.append(self._num_slots)
            self._num_slots += 1
        slot = self._unused.pop()
        self._slots[epoch] = slot
        self._epochs[slot] = epoch
        self._live |= 1 << slot

    def _retire(self, slot: int) -> Sweep:
        del self._epochs[slot]
        self._live &= ~(1 << slot)
        return self._sweep(slot)

    def _sweep(self, slot: int) -> Sweep:
        for shard in self._shards:
            for block_hash in [block_hash for block_hash, holders in shard.items() if holders >> slot & 1]:
                _clear(shard, block_hash, 1 << slot)
            yield
        self._unused.append(slot)


def _clear(rows: dict[BlockHash, int], block_hash: BlockHash, bit: int) -> None:
    holders = rows.get(block_hash, 0) & ~bit
    if holders:
        rows[block_hash] = holders
    else:
        rows.pop(block_hash, None)
