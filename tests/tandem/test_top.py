"""`tandem top` as a terminal shows it: true of the view, within the window, whatever the number of workers."""

from dataclasses import replace
from datetime import datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from core.ids import Epoch, WorkerId
from core.kv_spec import DType, KVSpec
from core.load import Load
from core.worker import Role, WorkerRecord
from gateway.overview import GoneView, Overview, WorkerView, to_json
from gateway.rates import Rates
from tandem.top import BLOCKS, Seen, block_bar, line, render, share

SPEC = KVSpec(2, 2, 16, 16, DType.FLOAT32, "m")


def worker(name: str, role: Role, num_running: int = 0, **fields: object) -> WorkerView:
    record = WorkerRecord(WorkerId(name), Epoch(1), role, "host:1", "m", SPEC, 512, 300, 100, 8)
    states = {"owned": 40, "leased": 10, "cached": 20, "free": 30}
    load = Load(100, 50, 1234, num_running, 2, 0.0125, 321.0, states)
    return replace(WorkerView(record, load, True, 0, 0.1), **fields)


def view(*workers: WorkerView, gone: tuple[GoneView, ...] = ()) -> Overview:
    rates = Rates(lambda: 100.0)
    stages = {"queue_s": 2, "decode_s": 3, "retry": 1}
    told = (rates.per_second(), rates.latencies(), rates.flows(), rates.history())
    return Overview("smollm2", "", "g", 100.0, list(workers), list(gone), 6, stages, [], [], *told)


def shown(seen: Seen, width: int = 130, height: int | None = None) -> list[str]:
    console = Console(width=width, record=True, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    console.print(render(seen, width, height))
    console.file.close()
    return console.export_text().splitlines()


def row_of(lines: list[str], start: str) -> str:
    (found,) = (line for line in lines if line.startswith(start))
    return found


def test_a_worker_is_told_with_all_of_its_numbers():
    lines = shown(Seen(view(worker("prefill-0", Role.PREFILL, 4)), "http://host"))
    row = row_of(lines, "prefill-0").split()
    assert row[:2] == ["prefill-0", "up"]
    assert row[3:] == ["50/100", "████····", "4/8", "2", "1,234", "12.5", "321"]
    assert lines[0].split() == ["smollm2", "http://host", "live", "q", "quits"]
    assert row_of(lines, "queue").split()[:2] == ["queue", "2"]
    assert row_of(lines, "retry").split()[:2] == ["retry", "1"]
    assert "6 requests in flight" in "\n".join(lines)


def test_trouble_is_told_in_words():
    told = view(
        worker("decode-0", Role.DECODE, is_up=False),
        worker("decode-1", Role.DECODE, silent_s=2.9),
        worker("decode-2", Role.DECODE, load=Load(is_draining=True)),
        gone=(GoneView("decode-3", "decode", 100, 12.0, "killed"),),
    )
    lines = shown(Seen(told, "http://host", datetime(2026, 1, 2, 3, 4, 5)))
    wanted = {
        "decode-0": "no session",
        "decode-1": "silent 3 s",
        "decode-2": "draining",
        "decode-3": "gone 12 s",
    }
    for name, words in wanted.items():
        assert words in row_of(lines, name)
    assert "gateway gone since 03:04:05, still asking" in lines[0]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 24), (130, 40), (200, 60)])
@pytest.mark.parametrize("count", [1, 100])
def test_it_fits_the_window_and_shows_those_in_trouble_and_the_busiest(width, height, count):
    workers = [worker(f"decode-{number}", Role.DECODE, num_running=number % 8) for number in range(count)]
    if count > 1:
        workers[50] = replace(workers[50], is_up=False)
    lines = shown(Seen(view(*workers), "http://host"), width, height)
    assert len(lines) <= height
    assert max(len(line) for line in lines) <= width
    if count > 1:
        assert "no session" in row_of(lines, "decode-50")
        assert any(line.startswith("decode-7 ") for line in lines)
        assert "workers with less to do" in "\n".join(lines)


@given(st.lists(st.integers(0, 5000), min_size=6, max_size=6), st.integers(6, 40))
def test_a_bar_has_its_length_and_a_place_for_whatever_is_there(counts, length):
    places = share(counts, length)
    assert sum(places) == (length if sum(counts) else 0)
    assert [bool(place) for place in places] == [bool(count) for count in counts]
    load = Load(blocks_by_state=dict(zip(BLOCKS, counts, strict=True)))
    assert len(block_bar(load, length).plain) == sum(places)


def test_a_line_is_as_high_as_its_share_of_the_largest():
    assert line([0, 1, 4, 8]) == " ▁▄█"
    assert line([0, 0]) == "  "
    assert line([]) == ""


def test_what_the_gateway_writes_is_what_top_reads():
    told = view(worker("prefill-0", Role.PREFILL), gone=(GoneView("d", "decode", 1, 2.0, "x"),))
    assert msgspec.json.decode(to_json(told), type=Overview) == told
