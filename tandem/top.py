"""`tandem top`: the cluster in a terminal, from the same view that its page shows.

    model, address, live or since when the gateway is gone
    workers: blocks by owner as a bar, batch, queue, step, speed
    requests in flight by stage   rates, the last minute as a line
                                  latencies

Asks for nothing but `/cluster`.
"""

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import httpx
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from core.errors import TandemError
from core.load import Load
from core.worker import Role
from gateway.overview import RETRY, Overview, WorkerView
from gateway.rates import Quantiles
from gateway.timing import STAGES

REFRESH_S = 1.0
ANSWER_S = 5.0
NOT_SHOWN = ("prepare_s", "first_step_s")  # before a request runs; known only afterwards
NOTHING_ENDED = {"after": str(2**53)}  # what ended is not shown here
SILENT_S = 2.5
BATCH_LEN, STAGE_LEN, MAX_LINE_LEN = 8, 10, 60
WIDE = 120
OTHER_LINES = 19
BLOCKS = {
    "owned": ("█", "blue"),
    "in_flight": ("█", "dark_orange"),
    "leased": ("█", "yellow"),
    "quarantined": ("█", "red"),
    "cached": ("▒", "blue"),
    "free": ("·", "bright_black"),
}
COLUMNS = (
    ("worker", 12),
    ("state", 10),
    ("KV blocks", 24),
    ("in use", 11),
    ("batch", 16),
    ("waiting", 7),
    ("queued tokens", 13),
    ("step ms", 7),
    ("tokens/s", 8),
)
NARROW_COLUMNS = (
    ("worker", 10),
    ("state", 9),
    ("KV blocks", 12),
    ("in use", 9),
    ("batch", 8),
    ("waiting", 7),
    ("step ms", 7),
    ("tokens/s", 8),
)
SHADES = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Seen:
    """The last view that the gateway gave, and since when it has given none."""

    view: Overview
    address: str
    lost_since: datetime | None = None


async def top(url: str, once: bool, console: Console | None = None) -> None:
    """Live until q or Ctrl-C, or printed once. Raises TandemError when the gateway does not answer the first time;
    after that its absence is shown, and it is asked again."""
    console = console or Console()
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S) as client:
        seen = Seen(await _ask(client), url)
        if once:
            console.print(render(seen, console.width))
            return
        with _quit_key() as quits, Live(render(seen, *console.size), console=console, screen=True) as live:
            async for now in _follow(client, seen, quits):
                live.update(render(now, *console.size), refresh=True)


async def _follow(client: httpx.AsyncClient, first: Seen, quits: asyncio.Event) -> AsyncIterator[Seen]:
    """What is seen each second until `quits`."""
    seen = first
    while not quits.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(quits.wait(), REFRESH_S)
        try:
            seen = Seen(await _ask(client), seen.address)
        except TandemError:
            seen = Seen(seen.view, seen.address, seen.lost_since or datetime.now())
        yield seen


async def _ask(client: httpx.AsyncClient) -> Overview:
    try:
        answer = await client.get("/cluster", params=NOTHING_ENDED)
        answer.raise_for_status()
        return msgspec.json.decode(answer.content, type=Overview)
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        raise TandemError(f"{client.base_url}: {error or type(error).__name__}") from error


@contextlib.contextmanager
def _quit_key() -> Iterator[asyncio.Event]:
    """Set when q is pressed, where there is a keyboard."""
    quits = asyncio.Event()
    if not sys.stdin.isatty():
        yield quits
        return
    keyboard, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(keyboard)

    def pressed() -> None:
        if b"q" in os.read(keyboard, 64).lower():
            quits.set()

    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, pressed)
    try:
        yield quits
    finally:
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def render(seen: Seen, width: int, height: int | None = None) -> RenderableType:
    """All of it; with a `height`, no more workers than there is room for."""
    view = seen.view
    most = None if height is None else max(height - OTHER_LINES, 3)
    below = Table.grid(padding=(0, 3))
    below.add_row(_stages(view), Group(_rates(view, min(width - 62, MAX_LINE_LEN)), "", _latencies(view)))
    return Group(_head(seen), "", _workers(view, width >= WIDE, most), "", below)


def _head(seen: Seen) -> Text:
    head = Text.assemble((f" {seen.view.model} ", "bold reverse"), f"  {seen.address}  ")
    if seen.lost_since is not None:
        head.append(f"gateway gone since {seen.lost_since:%H:%M:%S}, still asking", "bold red")
    else:
        head.append("live", "green")
    return head.append("   q quits", "bright_black")


def _workers(view: Overview, is_wide: bool, most: int | None) -> RenderableType:
    table = _table(padding=2 if is_wide else 1)
    for name, width in COLUMNS if is_wide else NARROW_COLUMNS:
        is_figure = name not in ("worker", "state", "KV blocks")
        table.add_column(name, justify="right" if is_figure else "left", no_wrap=True, min_width=width)
    workers = sorted(view.workers, key=lambda worker: _order(worker.record.role, worker.record.worker_id))
    shown = _most_telling(workers, most)
    for worker in shown:
        table.add_row(*_worker_row(worker, is_wide))
    for gone in view.gone[: None if most is None else max(most - len(shown), 1)]:
        table.add_row(gone.worker_id, Text(f"gone {gone.ago_s:.0f} s", "bold red"))
    left_out = len(workers) - len(shown)
    return Group(
        table, _legend().append(f"   and {left_out} workers with less to do" if left_out else "", "bold")
    )


def _most_telling(workers: Sequence[WorkerView], most: int | None) -> Sequence[WorkerView]:
    """In their order; of too many those in trouble, then the busiest."""
    if most is None or len(workers) <= most:
        return workers

    def ease(worker: WorkerView) -> tuple[bool, int]:
        return _state(worker).plain == "up", -worker.load.num_running - worker.load.num_waiting

    kept = {worker.record.worker_id for worker in sorted(workers, key=ease)[:most]}
    return [worker for worker in workers if worker.record.worker_id in kept]


def _order(role: Role, worker_id: str) -> tuple[bool, int, str]:
    return role is Role.DECODE, len(worker_id), worker_id


def _worker_row(worker: WorkerView, is_wide: bool) -> Iterable[RenderableType]:
    load, record = worker.load, worker.record
    if not worker.is_up:
        return record.worker_id, _state(worker)
    num_used = load.num_blocks - sum(load.blocks_by_state.get(state, 0) for state in ("free", "cached"))
    columns = COLUMNS if is_wide else NARROW_COLUMNS
    cells: dict[str, RenderableType] = {
        "worker": record.worker_id,
        "state": _state(worker),
        "KV blocks": block_bar(load, dict(columns)["KV blocks"]),
        "in use": f"{num_used}/{load.num_blocks}",
        "batch": _batch(load.num_running, record.max_batch, is_wide),
        "waiting": str(load.num_waiting),
        "queued tokens": f"{load.num_queued_tokens:,}",
        "step ms": f"{1000 * load.step_s:.1f}",
        "tokens/s": f"{load.tokens_per_s:,.0f}",
    }
    return [cells[name] for name, _ in columns]


def _batch(num_running: int, most: int, is_wide: bool) -> Text:
    bar = _fill(num_running, most, BATCH_LEN, "green") if is_wide else Text()
    return bar.append(f" {num_running}/{most}".rjust(8))


def _state(worker: WorkerView) -> Text:
    if not worker.is_up:
        return Text("no session", "bold red")
    if worker.silent_s is not None and worker.silent_s > SILENT_S:
        return Text(f"silent {worker.silent_s:.0f} s", "bold red")
    if worker.load.is_draining:
        return Text("draining", "yellow")
    return Text("up", "green")


def block_bar(load: Load, length: int) -> Text:
    """A pool to scale, each state with its colour; what is there at all has at least a place. All places together are
    `length`."""
    counts = {state: load.blocks_by_state.get(state, 0) for state in BLOCKS}
    bar = Text()
    for state, places in zip(BLOCKS, share(list(counts.values()), length), strict=True):
        sign, colour = BLOCKS[state]
        bar.append(sign * places, colour)
    return bar


def share(counts: Sequence[int], length: int) -> list[int]:
    """`length` places among counts, in proportion: at least one for each that is not 0, and none for a 0."""
    total = sum(counts)
    if not total:
        return [0] * len(counts)
    places = [max(round(length * count / total), 1) if count else 0 for count in counts]
    while (excess := sum(places) - length) != 0:
        largest = max(range(len(places)), key=places.__getitem__)
        places[largest] -= 1 if excess > 0 else -1
    return places


def _legend() -> Text:
    legend = Text()
    for state, (sign, colour) in BLOCKS.items():
        legend.append(sign * 2, colour).append(f" {state.replace('_', ' ')}  ", "bright_black")
    return legend


def _stages(view: Overview) -> Table:
    table = _table(f"{view.num_requests} requests in flight")
    table.add_column("stage", no_wrap=True, min_width=10)
    table.add_column("", justify="right", min_width=4)
    table.add_column("", no_wrap=True)
    names = {stage: stage.removesuffix("_s").replace("_", " ") for stage in STAGES if stage not in NOT_SHOWN}
    for stage, name in {**names, "decode_queue_s": "first step", RETRY: RETRY}.items():
        count = view.num_by_stage.get(stage, 0)
        table.add_row(name, str(count), _fill(count, view.num_requests, STAGE_LEN, "cyan"))
    return table


def _rates(view: Overview, line_len: int) -> Table:
    now, history = view.per_second, view.history
    table = _table(f"each second, mean of the last {now.over_s}")
    table.add_column("rate", no_wrap=True, min_width=12)
    table.add_column("", justify="right", min_width=8)
    table.add_column("until now", no_wrap=True)
    rows: list[tuple[str, str, list[int]]] = [
        ("requests", f"{now.requests:.1f}", history.requests),
        ("output tok", f"{now.output_tokens:,.0f}", history.output_tokens),
        ("prompt tok", f"{now.prompt_tokens:,.0f}", history.prompt_tokens),
        ("KV MiB", f"{now.kv_bytes / 2**20:,.1f}", history.kv_bytes),
        ("refused", f"{now.refusals:.1f}", history.refused),
    ]
    for name, figure, series in rows:
        table.add_row(name, figure, Text(line(series[-line_len:]) if line_len > 0 else "", "cyan"))
    return table


def line(series: Sequence[int]) -> str:
    """As high as their share of the largest; nothing is blank."""
    most = max(series, default=0)
    return "".join(SHADES[(value * len(SHADES) - 1) // most] if value else " " for value in series)


def _latencies(view: Overview) -> Table:
    found = view.latencies
    table = _table(f"latencies of the last {found.over_s} s, in ms")
    table.add_column("", no_wrap=True, min_width=14)
    for name in ("p50", "p99", "measured"):
        table.add_column(name, justify="right", min_width=8)
    table.add_row("to first token", *_quantiles(found.first_token_s))
    table.add_row("between tokens", *_quantiles(found.gap_s))
    return table


def _quantiles(found: Quantiles) -> list[str]:
    told = ["–" if value is None else f"{1000 * value:,.1f}" for value in (found.p50, found.p99)]
    return [*told, f"{found.num:,}"]


def _fill(count: int, most: int, length: int, colour: str) -> Text:
    places = min(max(round(length * count / most), bool(count)), length) if most else 0
    return Text("█" * places, colour).append("·" * (length - places), "bright_black")


def _table(title: str | None = None, padding: int = 2) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        header_style="bright_black",
        padding=(0, padding, 0, 0),
    )
