"""Where a request goes, from what is known of the workers."""

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from core.ids import Epoch, WorkerId
from core.load import Load
from core.worker import Role, WorkerRecord
from gateway.routing.router import (
    MAX_DECODE,
    MAX_LOCAL_S,
    RoundRobin,
    Route,
    RoutedPrompt,
    choose_prefill,
    choose_route,
    rank_decode,
)
from tests.gateway.routing.tables import EMPTY, SPEC, Known, known, table_of


def names(records: list[WorkerRecord]) -> list[str]:
    return [record.worker_id for record in records]


def prefill(workers: list[Known], num_tokens: int = 100, **overlap: int) -> str | None:
    record = choose_prefill(table_of(workers), num_tokens, _by_epoch(workers, overlap))
    return record.worker_id if record is not None else None


def decode(
    workers: list[Known], num_tokens: int = 100, max_len: int = 200, is_local: bool = False, **overlap: int
) -> list[str]:
    held = _by_epoch(workers, overlap)
    return names(rank_decode(table_of(workers), num_tokens, max_len, held, is_local=is_local))


def _by_epoch(workers: list[Known], overlap: dict[str, int]) -> dict[Epoch, int]:
    epochs = {worker.record.worker_id: worker.record.epoch for worker in workers}
    return {epochs[WorkerId(name)]: count for name, count in overlap.items()}


def test_prefill_goes_where_the_fewest_tokens_are_ahead():
    busy = known("a", replace(EMPTY, num_queued_tokens=500))
    told = known("b", num_pending_tokens=400)
    free = known("c", replace(EMPTY, num_queued_tokens=10))
    assert prefill([busy, told, free]) == "c"
    assert prefill([busy, told]) == "b"


def test_what_was_sent_and_what_is_published_are_not_counted_twice():
    seen = known("a", replace(EMPTY, num_queued_tokens=100), num_pending_tokens=100)
    other = known("b", replace(EMPTY, num_queued_tokens=150))
    assert prefill([seen, other]) == "a"


def test_a_cached_prefix_is_worth_the_tokens_it_saves():
    far = known("a", replace(EMPTY, num_queued_tokens=100))
    near = known("b")
    assert prefill([far, near], 100, a=4) == "a", "64 tokens count twice"
    assert prefill([far, near], 100, a=3) == "b"
    assert prefill([near, far], 16, a=1000) == "b", "no more than the prompt can be saved"


def test_a_burst_with_one_prefix_stays_together_until_the_queue_costs_more_than_the_prefix():
    """Each waits for those before it: ten tokens of its own."""
    holder = "a"
    for number in range(40):
        queue = known("a", num_pending_tokens=160 + 10 * number)
        chosen = prefill([queue, known("b")], 170, a=10)
        if chosen != holder:
            break
    assert chosen == "b"
    assert 10 <= number <= 20


def test_ties_are_broken_by_name_alone():
    pair = [known("b"), known("a")]
    assert prefill(pair) == prefill(pair[::-1]) == "a"
    assert decode(pair) == decode(pair[::-1]) == ["a", "b"]


def test_a_pool_that_is_too_small_is_left_out():
    small, large = known("a", num_blocks=4), known("b", num_blocks=64)
    assert prefill([small, large], 65) == "b"
    assert prefill([small], 65) is None
    assert prefill([small], 64) == "a"
    assert prefill([]) is None


def test_a_decode_pool_must_hold_the_output_too():
    small, large = known("a", num_blocks=8), known("b", num_blocks=64)
    assert decode([small, large], 100, 128) == ["a", "b"]
    assert decode([small, large], 100, 129) == ["b"]
    assert decode([small], 100, 129) == []


def test_decode_prefers_the_emptier_batch_relative_to_its_size():
    half = known("a", replace(EMPTY, num_running=4))
    large = known("b", replace(EMPTY, num_running=5), max_batch=32)
    assert decode([half, large]) == ["b", "a"]


def test_decode_weighs_a_cached_prefix_against_the_batch():
    holder = known("a", replace(EMPTY, num_running=3))
    empty = known("b")
    assert decode([holder, empty], 96, 200, a=6) == ["a", "b"]
    assert decode([holder, empty], 96, 200, a=1) == ["b", "a"]


def test_full_ones_come_last_but_are_kept():
    batch = known("a", replace(EMPTY, num_running=6, num_waiting=2))
    pool = known("b", replace(EMPTY, num_free_blocks=6))
    sent = known("c", num_pending=8)
    room = known("d", replace(EMPTY, num_running=7))
    ranked = decode([batch, pool, sent, room], 100)
    assert ranked[0] == "d"
    assert sorted(ranked) == ["a", "b", "c", "d"]


RATE = 1000.0


def route(
    prefill_load: Load = EMPTY,
    decode_load: Load = EMPTY,
    num_tokens: int = 320,
    on_prefill: int = 0,
    on_decode: int = 0,
    max_local: int = 1024,
    **options: int,
) -> Route:
    """One worker of each tier; `on_*` are the prompt's blocks that each holds."""
    near = known("p", replace(prefill_load, tokens_per_s=RATE))
    far = known("d", decode_load, max_local_tokens=max_local)
    tables = {Role.PREFILL: table_of([near]), Role.DECODE: table_of([far])}
    overlap = {near.record.epoch: on_prefill, far.record.epoch: on_decode}
    return choose_route(tables, RoutedPrompt(num_tokens, num_tokens + 50, overlap, **options))


def choose_with(ahead: int = 0, cost: float = 0.003, rate: float = RATE, **held: int) -> Route:
    """For 320 tokens: prefill workers p, where `ahead` are queued, and q, and a decode worker d that computes
    nothing; `held` are blocks by name."""
    queued = {"p": ahead, "q": 0}
    near = [known(name, replace(EMPTY, tokens_per_s=rate, num_queued_tokens=queued[name])) for name in queued]
    far = [known("d")]
    tables = {Role.PREFILL: table_of(near), Role.DECODE: table_of(far)}
    overlap = _by_epoch([*near, *far], held)
    return choose_route(tables, RoutedPrompt(320, 370, overlap, held=overlap, pull_cost_s=cost))


def pulled(route: Route) -> tuple[str, int] | None:
    return (route.pull.source.worker_id, route.pull.num_tokens) if route.pull is not None else None


def test_what_others_hold_is_pulled_to_where_the_prompt_is_computed():
    assert pulled(choose_with()) is None, "nobody has anything"
    found = choose_with(p=4, d=18)
    assert (found.prefill.worker_id, pulled(found)) == ("p", ("d", 288))
    assert pulled(choose_with(p=18, d=18)) is None
    assert pulled(choose_with(d=20)) == ("d", 304), "the last block has the last token, which is computed"


def test_a_pull_that_takes_longer_than_computing_is_none():
    assert pulled(choose_with(p=4, d=5, cost=0.015)) == ("d", 80), "16 ms to compute"
    assert pulled(choose_with(p=4, d=5, cost=0.017)) is None
    assert pulled(choose_with(p=4, d=18, cost=math.inf)) is None
    assert pulled(choose_with(p=4, d=5, cost=0.017, rate=0.0)) == ("d", 80), "nobody knows how long"
    assert pulled(choose_with(p=4, d=18, cost=math.inf, rate=0.0)) is None


def test_a_hot_prefix_is_pulled_before_its_holder_is_queued_for_as_long_as_it_takes_to_compute():
    """Twice the work against the wait: without a pull the other would have 320 tokens to compute."""
    for ahead, name in ((100, "p"), (200, "q")):
        found = choose_with(p=20, ahead=ahead)
        assert found.prefill.worker_id == name
        assert pulled(found) == (None if name == "p" else ("p", 304))


def test_of_those_that_hold_as_much_the_idle_one_sends():
    assert pulled(choose_with(p=20, d=20, ahead=2000)) == ("d", 304)
    assert pulled(choose_with(p=20, d=19, ahead=2000)) == ("d", 304), "as much of what is wanted"
    assert pulled(choose_with(p=20, d=18, ahead=2000)) == ("p", 304)


def test_what_is_only_about_to_be_there_is_not_pulled():
    near, far = [known("p"), known("q", replace(EMPTY, num_queued_tokens=1000))], [known("d")]
    tables = {Role.PREFILL: table_of(near), Role.DECODE: table_of(far)}
    overlap = _by_epoch([*near, *far], {"q": 20})
    assert pulled(choose_route(tables, RoutedPrompt(320, 370, overlap))) is None
    assert pulled(choose_route(tables, RoutedPrompt(320, 370, overlap, held=overlap))) == ("q", 304)


def test_the_next_turn_of_a_chat_is_computed_where_the_last_one_was_generated():
    assert route(on_prefill=10, on_decode=18).cause == "cached_on_decode"
    assert route(on_prefill=18, on_decode=18).cause == "", "what is equal is handed over"
    assert route(on_prefill=0, on_decode=9).cause == "", "it lacks more than half"
    assert route(on_prefill=10, on_decode=18, may_be_local=False).cause == ""
    assert route(on_prefill=10, on_decode=18, max_local=31).cause == "", "more than it would take"


def test_what_waits_on_decode_counts_once_for_each_that_waits():
    streaming = replace(EMPTY, num_running=2)
    short = {"num_tokens": 20 * 16, "on_decode": 18}
    assert route(decode_load=streaming, on_prefill=10, **short).cause == "cached_on_decode"
    assert route(decode_load=streaming, on_prefill=15, **short).cause == "", "80 there, 3 x 32 here"
    queued = replace(EMPTY, num_queued_tokens=200)
    assert route(decode_load=queued, on_prefill=10, **short).cause == ""
    assert route(queued, streaming, on_prefill=15, **short).cause == "cached_on_decode"
    assert route(decode_load=replace(EMPTY, num_running=8), on_prefill=0, **short).cause == "", "no place"


def test_streams_never_wait_long_for_a_prompt_that_others_could_compute():
    longest = int(MAX_LOCAL_S * RATE)
    streaming = replace(EMPTY, num_running=1)
    for lacking, cause in ((longest, "cached_on_decode"), (longest + 1, "")):
        num_tokens = 50 * 16 + lacking
        assert route(decode_load=streaming, num_tokens=num_tokens, on_decode=50).cause == cause


def test_a_short_prompt_is_computed_on_decode_where_the_gateway_is_told_so():
    assert route(num_tokens=64, max_local_tokens=64).cause == "short_prompt"
    assert route(num_tokens=65, max_local_tokens=64).cause == ""
    assert route(num_tokens=80, on_decode=1, max_local_tokens=64).cause == "short_prompt"


def test_without_a_prefill_worker_decode_computes_it_and_that_is_told_where_it_is_unusual():
    for max_local, cause in ((1024, "no_prefill_worker"), (1 << 30, "")):
        tables = {Role.PREFILL: table_of([]), Role.DECODE: table_of([known("d", max_local_tokens=max_local)])}
        found = choose_route(tables, RoutedPrompt(100, 200, {}))
        assert (found.prefill, names(found.decode), found.cause) == (None, ["d"], cause)


def test_whoever_has_computed_a_prompt_sends_it_again():
    table = table_of([known("p1"), known("p2")])
    tables = {Role.PREFILL: table, Role.DECODE: table_of([known("d", max_local_tokens=1024)])}
    holder = table.rows[1].record
    asked = RoutedPrompt(10, 20, {}, max_local_tokens=64, holder=holder)
    assert choose_route(tables, asked).prefill is holder


def test_round_robin_takes_each_in_turn_whatever_it_holds():
    busy = known("b", replace(EMPTY, num_queued_tokens=5000))
    tables = {Role.PREFILL: table_of([known("c"), known("a"), busy]), Role.DECODE: table_of([known("d")])}
    choose = RoundRobin()
    overlap = {row.record.epoch: 6 for row in tables[Role.PREFILL].rows}
    chosen = [choose(tables, RoutedPrompt(100, 200, overlap)).prefill for _ in range(6)]
    assert names(chosen) == ["a", "b", "c"] * 2
    avoiding = RoutedPrompt(100, 200, {}, avoid={WorkerId("a")})
    avoided = [choose(tables, avoiding).prefill for _ in range(3)]
    assert WorkerId("a") not in names(avoided)
    assert names(choose(tables, RoutedPrompt(100, 200, {})).decode) == ["d"]


def test_a_prompt_that_is_computed_on_decode_goes_where_little_is_ahead_of_it():
    long = known("a", replace(EMPTY, num_queued_tokens=900, num_running=1))
    many = known("b", replace(EMPTY, num_running=6))
    assert decode([long, many], is_local=True) == ["b", "a"]
    assert decode([long, many]) == ["a", "b"]
    sent = known("c", num_pending_tokens=2000)
    assert decode([sent, long], is_local=True) == ["a", "c"]


def test_of_a_thousand_workers_only_the_best_are_named():
    workers = [known(f"w{n:04}", replace(EMPTY, num_running=n % 8)) for n in range(1000)]
    assert decode(workers) == [f"w{8 * n:04}" for n in range(MAX_DECODE)]
    avoid = {WorkerId("w0000")}
    table = table_of(workers)
    assert choose_prefill(table, 10, {}, avoid).worker_id == "w0001"
    assert "w0000" not in names(rank_decode(table, 10, 20, {}, avoid))


def test_who_is_not_open_is_not_chosen_and_who_is_gone_may_still_be_told():
    table = table_of([known("a"), known("b"), known("c")])
    rows = {row.record.worker_id: row for row in table.rows}
    rows["a"].set_up(False)
    rows["b"].publish(replace(EMPTY, is_draining=True))
    assert choose_prefill(table, 10, {}).worker_id == "c"
    table.remove(rows["a"])
    rows["a"].pend_tokens(1000)
    rows["a"].publish(replace(EMPTY, num_queued_tokens=500))
    assert sorted(table.column("ahead")) == [0, 0]
    rows["c"].set_fitting(False)
    assert choose_prefill(table, 10, {}) is None
    assert rank_decode(table, 10, 20, {}) == []


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 99)), max_size=80))
def test_a_table_is_what_its_rows_say_after_any_joins_and_leaves(changes):
    table, rows = table_of([]), {}
    for joins, number, value in changes:
        if joins and number not in rows:
            rows[number] = table.add(known(f"w{number}").record)
        elif number in rows:
            rows[number].pend_tokens(value)
            if not joins:
                table.remove(rows.pop(number))
    assert {row.record.worker_id for row in table.rows} == {f"w{number}" for number in rows}
    for number, row in rows.items():
        assert table.column("ahead")[row.slot] == row.num_pending_tokens, number
        assert table.by_epoch[row.record.epoch] is row
    order = sorted(rows.values(), key=lambda row: table.order[row.slot])
    assert [row.record.worker_id for row in order] == sorted(row.record.worker_id for row in order)


LOADS = st.builds(
    Load,
    num_blocks=st.just(64),
    num_free_blocks=st.integers(0, 64),
    num_queued_tokens=st.integers(0, 1000),
    num_running=st.integers(0, 8),
    num_waiting=st.integers(0, 8),
)
WORKERS = st.lists(
    st.tuples(LOADS, st.integers(1, 64), st.integers(0, 500), st.integers(0, 9)), max_size=6
).map(
    lambda rows: [
        known(f"w{index}", load, blocks, num_pending_tokens=tokens, num_pending=pending)
        for index, (load, blocks, tokens, pending) in enumerate(rows)
    ]
)


@given(WORKERS, st.integers(1, 600), st.integers(0, 400), st.data())
def test_decisions_depend_on_the_workers_and_not_on_their_order(workers, num_tokens, num_more, data):
    shuffled = data.draw(st.permutations(workers))
    overlap = {c.record.epoch: data.draw(st.integers(0, 40)) for c in workers}
    max_len = num_tokens + num_more
    table, other = table_of(workers), table_of(shuffled)
    assert choose_prefill(table, num_tokens, overlap) == choose_prefill(other, num_tokens, overlap)
    ranked = rank_decode(table, num_tokens, max_len, overlap)
    assert ranked == rank_decode(other, num_tokens, max_len, overlap)
    fitting = [c.record for c in workers if SPEC.num_blocks_for(max_len) <= c.record.num_blocks]
    assert sorted(names(ranked)) == sorted(names(fitting))


def test_a_worker_s_own_count_takes_prompts_whole_and_that_is_not_believed_of_ours():
    table = table_of([known("a")])
    row = table.rows[0]
    row.pend_tokens(20, 180)
    row.publish(replace(EMPTY, num_queued_tokens=200))
    assert table.column("ahead")[0] == row.num_ahead == 20
    row.publish(replace(EMPTY, num_queued_tokens=500))
    assert row.num_ahead == 320, "another gateway sent 300"
    row.pend_tokens(-20, -180)
    assert row.num_ahead == 500
