"""Blocks on disk: what is read is what was written or a miss, bounded, after any end and any damage."""

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.clock import VirtualClock
from core.ids import BlockHash
from kv_cache.disk_store import RETRY_S, DiskStore

BLOCK = 512
RECORD = BLOCK + 32
HASHES = [BlockHash(bytes([number]) * 16) for number in range(40)]


def content(block_hash: BlockHash) -> memoryview:
    return memoryview(bytearray(block_hash[:1] * BLOCK))


def opened(
    directory: Path, max_bytes: int = 1 << 20, content: str = "model", segment: int = 4 * RECORD + 40
) -> DiskStore:
    return DiskStore(directory, content, BLOCK, max_bytes, segment, VirtualClock())


def found(store: DiskStore, block_hash: BlockHash) -> bool:
    """Whether it is there; and then it is what was written."""
    into = bytearray(BLOCK)
    is_found = store.get(block_hash, memoryview(into))
    assert not is_found or bytes(into) == bytes(content(block_hash))
    return is_found


def fill(store: DiskStore, hashes: list[BlockHash]) -> list[BlockHash]:
    return [gone for block_hash in hashes for gone in store.put(block_hash, content(block_hash))]


def test_what_was_put_is_found_by_the_next_owner_too(tmp_path: Path):
    store = opened(tmp_path)
    fill(store, HASHES[:10])
    assert all(found(store, block_hash) for block_hash in HASHES[:10])
    assert not found(store, HASHES[10])
    store.close()
    store = opened(tmp_path)
    assert set(store.hashes()) == set(HASHES[:10])
    fill(store, HASHES[10:12])
    assert all(found(store, block_hash) for block_hash in HASHES[:12])
    assert len(list(tmp_path.glob("*.kv"))) == 3
    store.close()


def test_it_stays_within_its_bytes_and_what_is_used_stays(tmp_path: Path):
    store = opened(tmp_path, max_bytes=4 * (4 * RECORD + 40))
    gone = fill(store, HASHES[:16])
    assert gone == []
    assert found(store, HASHES[0]), "the first segment has been used"
    gone = fill(store, HASHES[16:20])
    assert gone == HASHES[4:8]
    assert found(store, HASHES[1])
    held = sum(path.stat().st_size for path in tmp_path.glob("*.kv"))
    assert held == store.counts.num_bytes <= 4 * (4 * RECORD + 40)
    assert store.counts.num_blocks == len(store.hashes()) == 16
    store.close()


def test_a_file_that_ends_anywhere_has_what_is_whole(tmp_path: Path):
    store = opened(tmp_path, segment=100 * RECORD)
    fill(store, HASHES[:3])
    store.close()
    (path,) = tmp_path.glob("*.kv")
    whole = path.read_bytes()
    for size in [*range(0, 45), *range(len(whole) - RECORD - 2, len(whole))]:
        path.write_bytes(whole[:size])
        store = opened(tmp_path, segment=100 * RECORD)
        num_whole = max(0, size - 40) // RECORD
        assert [found(store, block_hash) for block_hash in HASHES[:3]] == [n < num_whole for n in range(3)]
        fill(store, HASHES[:5])
        assert all(found(store, block_hash) for block_hash in HASHES[:5])
        store.close()
        for other in tmp_path.glob("*.kv"):
            other.unlink()


def test_a_byte_that_changed_is_a_miss_and_counted(tmp_path: Path):
    store = opened(tmp_path, segment=100 * RECORD)
    fill(store, HASHES[:2])
    store.close()
    (path,) = tmp_path.glob("*.kv")
    whole = path.read_bytes()
    for place in (40, 40 + 16, 40 + 31, 40 + 32, 40 + RECORD - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        store = opened(tmp_path, segment=100 * RECORD)
        assert not found(store, HASHES[0])
        assert found(store, HASHES[1])
        assert sum(found(store, block_hash) for block_hash in store.hashes()) == 1
        assert store.counts.num_bad == 1
        store.close()


def test_what_another_model_or_geometry_has_written_is_dropped(tmp_path: Path):
    store = opened(tmp_path)
    fill(store, HASHES[:4])
    store.close()
    (tmp_path / "00000009.kv").write_bytes(b"something else" * 100)
    (tmp_path / "notes.kv").write_bytes(b"")
    store = opened(tmp_path, content="another model")
    assert store.hashes() == []
    assert list(tmp_path.glob("*.kv")) == []
    store.close()


def test_a_directory_has_one_owner(tmp_path: Path):
    store = opened(tmp_path)
    with pytest.raises(ValueError, match="another worker's"):
        opened(tmp_path)
    store.close()
    opened(tmp_path).close()


def test_a_directory_that_cannot_be_made_and_too_few_bytes_are_mistakes(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be used"):
        opened(tmp_path / "file" / "below")
    with pytest.raises(ValueError, match="not room"):
        opened(tmp_path, max_bytes=RECORD)


def test_a_disk_that_refuses_costs_hits_and_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = VirtualClock()
    store = DiskStore(tmp_path, "model", BLOCK, 1 << 20, 4 * RECORD + 40, clock)
    fill(store, HASHES[:2])

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", refuse)
        fill(store, HASHES[2:4])
    assert store.counts.num_errors == 1, "not tried again at once"
    assert found(store, HASHES[0])
    fill(store, HASHES[4:5])
    assert not found(store, HASHES[4])
    clock.advance(RETRY_S + 1)
    fill(store, HASHES[5:6])
    assert found(store, HASHES[5])
    store.close()


def test_nothing_is_left_after_clear(tmp_path: Path):
    store = opened(tmp_path)
    fill(store, HASHES[:9])
    assert set(store.clear()) == set(HASHES[:9])
    assert store.hashes() == list(tmp_path.glob("*.kv")) == []
    fill(store, HASHES[:2])
    assert found(store, HASHES[1])
    store.close()


@pytest.mark.parametrize("num_bytes", range(2 * (RECORD + 40), 12 * RECORD, 37))
def test_any_room_for_two_blocks_is_used_and_not_exceeded(tmp_path: Path, num_bytes: int):
    store = opened(tmp_path, num_bytes)
    for block_hash in HASHES[:20]:
        fill(store, [block_hash])
        assert found(store, block_hash)
        assert sum(path.stat().st_size for path in tmp_path.glob("*.kv")) <= num_bytes
    store.close()


def test_threads_may_all_use_it(tmp_path: Path):
    store = opened(tmp_path, max_bytes=3 * (4 * RECORD + 40))
    failures: list[BaseException] = []

    def work(start: int) -> None:
        try:
            for round_ in range(30):
                block_hash = HASHES[(start * 7 + round_) % len(HASHES)]
                store.put(block_hash, content(block_hash))
                found(store, block_hash)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert store.counts.num_bad == 0
    store.close()


STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "reopen", "clear"]), st.integers(0, len(HASHES) - 1)),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_whatever_is_done_it_has_what_it_says_and_says_what_went(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
):
    directory = tmp_path_factory.mktemp("store")
    size = 3 * (4 * RECORD + 40)
    store = opened(directory, size)
    held: set[BlockHash] = set()
    for what, number in steps:
        block_hash = HASHES[number]
        if what == "put":
            gone = store.put(block_hash, content(block_hash))
            held = held - set(gone) | {block_hash}
        elif what == "get":
            assert found(store, block_hash) is (block_hash in held)
        elif what == "clear":
            assert set(store.clear()) == held
            held = set()
        else:
            store.close()
            store = opened(directory, size)
        assert set(store.hashes()) == held
        assert sum(path.stat().st_size for path in directory.glob("*.kv")) <= size
    store.close()
