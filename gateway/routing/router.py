"""Which workers serve a request. Pure decisions over what is known now: no I/O, no torch; the simulator runs them.

Prefill: whoever would have computed the prompt first, from what is queued there and what it lacks of this one, which
counts twice. (Rates are not compared: what a worker did a second lately depends on how long its prompts were.)
Decode: prefix overlap, room in the batch and free blocks, in that order of weight. A worker that computes the prompt
itself: as for prefill, and few sequences whose tokens come between.

A prompt that is mostly cached on its decode worker is computed there when that is cheaper for everybody concerned:

    there       (queued + lacking) / rate, once for the prompt and once for each sequence that waits for it
    prefilled   (queued + lacking) / rate, both of the prefill worker

What another worker holds can be pulled to the one that computes, when that takes less time than computing it again:
so everybody is as good as one that holds PULLED_WORTH of what the best one does.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from core.block_hash import HASH_BLOCK_TOKENS
from core.ids import Epoch, WorkerId
from core.worker import Role, WorkerRecord
from gateway.routing.worker_table import Column, WorkerRow, WorkerTable

Overlap = Mapping[Epoch, int]
"""Leading hash blocks of the prompt that a worker is believed to hold."""

NOBODY: Collection[WorkerId] = frozenset()
MAX_DECODE = 8
"""Decode workers that one attempt asks at most."""

MAX_LOCAL_S = 0.05
"""Sequences that decode wait no longer for a prompt that is computed between their tokens by choice."""

WORK_WEIGHT = 2.0
"""A token that is computed again delays all who come later: a prompt follows its prefix to a queue that is longer by
up to so many times what it would compute again, and no longer: a hot prefix spreads."""

PULLED_WORTH = 0.75
"""A token that has to be moved is worth so much of one that is there."""

PULL_COST_S, PULL_BYTES_PER_S = 0.003, 1e9
"""What a pull takes beyond its bytes, and how fast these are taken to be while their source has sent little."""

MIN_MEASURED_BYTES = 1 << 24

FULL, AVOIDED = 1.0, 2.0
"""Costs are below 1: taken when there is nobody else, and last of all."""

SEQUENCE_TOKENS = 32
"""A running sequence holds up a prompt on the same worker like so many of its tokens."""

TYPICAL_TOKENS = 4096.0
FAR, PREFILL_NAME_TIE = 1e12, 1e-6
FREE_TIE, NAME_TIE = 1e-7, 1e-12
"""Of equal costs the one with the larger free part of its pool, then by name."""


@dataclass(frozen=True, slots=True)
class Pull:
    """`source` holds the prompt's first `num_tokens`, whole blocks, which are to be moved to who computes it."""

    source: WorkerRecord
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Route:
    """Who serves an attempt: decode workers in order of preference, and `prefill` unless the first of them that takes
    it computes the prompt; `cause` says why it does, when others could. `pull` comes before the computing."""

    prefill: WorkerRecord | None
    decode: list[WorkerRecord]
    overlap: Overlap
    cause: str = ""
    pull: Pull | None = None


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """A prompt of `num_tokens` that may become `max_len` tokens. One of which the decode worker lacks at most
    `max_local_tokens` is computed there whatever that costs; `holder` has computed it already. What workers
    have `held` for some time can be moved to others; that costs `pull_cost_s` and more for each byte."""

    num_tokens: int
    max_len: int
    overlap: Overlap
    max_local_tokens: int = 0
    avoid: Collection[WorkerId] = NOBODY
    holder: WorkerRecord | None = None
    may_be_local: bool = True
    held: Overlap = field(default_factory=dict)
    pull_cost_s: float = PULL_COST_S


Tables = Mapping[Role, WorkerTable]
Routing = Callable[[Tables, RoutedPrompt], Route]


def choose_route(tables: Tables, asked: RoutedPrompt) -> Route:
    """By cached prefixes and load."""
    route = _choose(tables, asked)
    target = route.prefill or next(iter(route.decode), None)
    if target is None or target is asked.holder:
        return route
    return replace(route, pull=_plan_pull(tables, target, asked))


def _choose(tables: Tables, asked: RoutedPrompt) -> Route:
    num_tokens, overlap, avoid = asked.num_tokens, asked.overlap, asked.avoid
    reach = _reach(tables, asked)
    prefill = asked.holder or choose_prefill(tables[Role.PREFILL], num_tokens, overlap, avoid, reach)
    decode = rank_decode(
        tables[Role.DECODE], num_tokens, asked.max_len, overlap, avoid, prefill is None, reach
    )
    if prefill is None or not decode:
        is_colocated = bool(decode) and decode[0].is_colocated
        return Route(None, decode, overlap, "" if is_colocated else "no_prefill_worker")
    if asked.may_be_local and asked.holder is None:
        lacking = _lacking(decode[0], num_tokens, overlap)
        if lacking <= asked.max_local_tokens:
            return Route(None, decode, overlap, "short_prompt")
        sides = tables[Role.PREFILL].by_epoch[prefill.epoch], tables[Role.DECODE].by_epoch[decode[0].epoch]
        if _is_cheaper_on_decode(*sides, num_tokens, overlap, reach):
            return Route(None, decode, overlap, "cached_on_decode")
    return Route(prefill, decode, overlap)


class RoundRobin:
    """Each worker of a tier in turn, whatever it holds or has to do: what others are compared with."""

    def __init__(self) -> None:
        self._turn = -1

    def __call__(self, tables: Tables, asked: RoutedPrompt) -> Route:
        self._turn += 1
        prefill = self._in_turn(tables[Role.PREFILL], asked.num_tokens, asked.avoid)
        decode = self._in_turn(tables[Role.DECODE], asked.max_len, asked.avoid)
        chosen = asked.holder or (prefill[0] if prefill else None)
        cause = "no_prefill_worker" if chosen is None and decode and not decode[0].is_colocated else ""
        return Route(chosen, decode[:MAX_DECODE], asked.overlap, cause)

    def _in_turn(
        self, table: WorkerTable, num_tokens: int, avoid: Collection[WorkerId]
    ) -> list[WorkerRecord]:
        fitting = [row.record for row, fits in zip(table.rows, _fits(table, num_tokens), strict=True) if fits]
        fitting.sort(key=lambda record: record.worker_id)
        first = self._turn % len(fitting) if fitting else 0
        return sorted([*fitting[first:], *fitting[:first]], key=lambda record: record.worker_id in avoid)


def choose_prefill(
    table: WorkerTable,
    num_tokens: int,
    overlap: Overlap,
    avoid: Collection[WorkerId] = NOBODY,
    reach: int = 0,
) -> WorkerRecord | None:
    """The prefill worker that would finish `num_tokens` first, work that need not be done counting more than waiting;
    one of `avoid` only if there is no other; None when no pool is large enough. None lacks `reach` tokens."""
    if not table.rows:
        return None
    cost = table.column("ahead") + WORK_WEIGHT * num_tokens
    _credit(cost, table, num_tokens, overlap, WORK_WEIGHT, reach)
    cost += PREFILL_NAME_TIE * table.order
    _avoid(cost, table, avoid, FAR)
    cost[~_fits(table, num_tokens)] = np.inf
    best = int(cost.argmin())
    return table.rows[best].record if cost[best] < np.inf else None


def rank_decode(
    table: WorkerTable,
    num_tokens: int,
    max_len: int,
    overlap: Overlap,
    avoid: Collection[WorkerId] = NOBODY,
    is_local: bool = False,
    reach: int = 0,
) -> list[WorkerRecord]:
    """Decode workers for a prompt of `num_tokens`, the best first, those of `avoid` last, MAX_DECODE at most; only
    those whose pool holds `max_len` tokens, what it may become. `is_local`: it is to be computed there, where none
    lacks `reach` tokens."""
    if not table.rows:
        return []
    if is_local:
        ahead = table.column("ahead") + SEQUENCE_TOKENS * table.column("sequences")
        cost = (ahead + num_tokens) / TYPICAL_TOKENS
        _credit(cost, table, num_tokens, overlap, 1.0 / TYPICAL_TOKENS, reach)
    else:
        cost = table.column("share") + 0.5
        _credit(cost, table, num_tokens, overlap, 0.5 / num_tokens)
    cost /= 1.0 + cost
    num_blocks = -(-(num_tokens + 1) // table.block_size)
    is_full = (table.column("share") >= 1.0) | (table.column("free_blocks") < num_blocks)
    cost += NAME_TIE * table.order - FREE_TIE * table.column("room")
    cost[is_full] += FULL
    _avoid(cost, table, avoid, AVOIDED)
    cost[~_fits(table, max_len)] = np.inf
    return [table.rows[slot].record for slot in _least(cost, MAX_DECODE)]


def cached_tokens(record: WorkerRecord, num_tokens: int, overlap: Overlap) -> int:
    """Leading tokens of a prompt of `num_tokens` that this worker is believed to hold."""
    return min(overlap.get(record.epoch, 0) * HASH_BLOCK_TOKENS, num_tokens)


def _reach(tables: Tables, asked: RoutedPrompt) -> int:
    """Of how many tokens nobody is worse off than if they were cached: others' can be pulled."""
    return int(PULLED_WORTH * max((num_held for num_held, _ in _holders(tables, asked)), default=0))


def _holders(tables: Tables, asked: RoutedPrompt) -> list[tuple[int, WorkerRow]]:
    """Everybody that can be reached and holds some of the prompt, with how much."""
    rows = [table.by_epoch.get(epoch) for table in tables.values() for epoch in asked.held]
    return [
        (cached_tokens(row.record, asked.num_tokens, asked.held), row)
        for row in rows
        if row is not None and row.is_up
    ]


def _plan_pull(tables: Tables, target: WorkerRecord, asked: RoutedPrompt) -> Pull | None:
    """From whoever holds most, and of these from one that computes least (it lends between two steps), if that takes
    less time than to compute what it has and `target` has not."""
    spec = target.kv_spec
    most = (asked.num_tokens - 1) // spec.block_size * spec.block_size
    others = [
        (min(num_held, most), -row.num_ahead, row.record.worker_id, row)
        for num_held, row in _holders(tables, asked)
        if row.record is not target
    ]
    if not others:
        return None
    num_tokens, _, _, source = max(others)
    gain = num_tokens + _lacking(target, asked.num_tokens, asked.overlap) - asked.num_tokens
    rate = next(
        t.by_epoch[target.epoch] for t in tables.values() if target.epoch in t.by_epoch
    ).load.tokens_per_s
    move_s = asked.pull_cost_s + gain * spec.token_bytes / _bytes_per_s(source)
    is_worth = gain > 0 and (gain / rate if rate else FAR) > move_s
    return Pull(source.record, num_tokens) if is_worth else None


def _bytes_per_s(source: WorkerRow) -> float:
    """At which it has sent KV so far."""
    sent = source.load.counts.sent
    num_bytes, seconds = sum(one.num_bytes for one in sent), sum(one.seconds for one in sent)
    return num_bytes / seconds if num_bytes > MIN_MEASURED_BYTES and seconds else PULL_BYTES_PER_S


def _lacking(record: WorkerRecord, num_tokens: int, overlap: Overlap) -> int:
    """Tokens that it would have to compute: the last one always is, and the block it is in."""
    size = record.kv_spec.block_size
    return num_tokens - min(cached_tokens(record, num_tokens, overlap), (num_tokens - 1) // size * size)


def _is_cheaper_on_decode(
    prefill: WorkerRow, decode: WorkerRow, num_tokens: int, overlap: Overlap, reach: int
) -> bool:
    """Whether the decode worker, which has most of the prompt, had better compute the rest: sooner in sum for all
    whose tokens wait for it, and none of them for long. Its rate is taken to be the prefill worker's."""
    lacking = _lacking(decode.record, num_tokens, overlap)
    rate, num_sequences = prefill.load.tokens_per_s, decode.num_sequences
    if lacking > min(num_tokens // 2, decode.record.max_local_tokens) or not rate:
        return False
    if num_sequences >= decode.record.max_batch or (num_sequences > 0 and lacking > MAX_LOCAL_S * rate):
        return False
    there = (decode.num_ahead + lacking) * (1 + num_sequences)
    return there < prefill.num_ahead + num_tokens - max(
        reach, cached_tokens(prefill.record, num_tokens, overlap)
    )


def _fits(table: WorkerTable, num_tokens: int) -> np.ndarray:
    return (table.column("is_open") > 0) & (table.column("pool_tokens") >= num_tokens)


def _credit(
    cost: Column, table: WorkerTable, num_tokens: int, overlap: Overlap, weight: float, reach: int = 0
) -> None:
    """Those that hold some of the prompt cost less by that, all by what they can pull."""
    cost -= weight * reach
    for epoch in overlap:
        row = table.by_epoch.get(epoch)
        if row is not None and row.slot is not None:
            cost[row.slot] -= weight * max(cached_tokens(row.record, num_tokens, overlap) - reach, 0)


def _avoid(cost: Column, table: WorkerTable, avoid: Collection[WorkerId], penalty: float) -> None:
    if avoid:
        for row in table.rows:
            if row.record.worker_id in avoid and row.slot is not None:
                cost[row.slot] += penalty


def _least(cost: Column, count: int) -> list[int]:
    """The `count` slots that cost least, in that order; none that cost infinitely much."""
    nearest = np.argpartition(cost, count)[:count] if len(cost) > count else np.arange(len(cost))
    ordered = nearest[np.argsort(cost[nearest])]
    return [int(slot) for slot in ordered if cost[slot] < np.inf]
