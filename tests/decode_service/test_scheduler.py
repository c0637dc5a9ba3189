"""The decode tier as its engine process drives it. The tests play the connector and write the KV."""

from dataclasses import replace

import msgspec
import pytest

from core.block_hash import hash_chain
from core.errors import ErrorCode
from core.grant import FirstToken
from decode_service.scheduler import (
    MAX_QUEUED_RESERVES,
    SUSPEND_LIMIT_S,
)
from engine.block_pool import BlockPool, BlockState
from engine.config import MAX_LOCAL_TOKENS
from engine.messages import (
    AbortWork,
    Activate,
    Credit,
    Quiet,
    Reserved,
    WorkAborted,
)
from tests.decode_service.rig import BLOCK, CONTEXT, Rig, codes, expected, id_of, reserve


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 40, 48])
def test_a_reserved_activated_prompt_decodes_to_its_end(num_tokens):
    rig = Rig()
    command = reserve(1, range(num_tokens))
    reserved = rig.reserve(command)
    assert len(reserved.block_ids) == -(-num_tokens // BLOCK)
    assert reserved.num_tokens == num_tokens
    chain = hash_chain(range(num_tokens), "model")
    assert reserved.chain_hash == (chain[-1] if chain else b"")
    rig.activate(command, reserved)
    tokens = rig.run()
    assert rig.tokens[id_of(1)] == expected(command)
    assert [event.position for event in tokens] == list(range(1, 8))
    assert [event.finish_reason for event in tokens] == [""] * 6 + ["length"]
    assert rig.is_idle()


def test_nothing_is_decoded_before_the_seal_is_verified():
    rig = Rig()
    rig.reserve(reserve(1, range(40)))
    assert rig.step() == []
    assert rig.pool.counts[BlockState.IN_FLIGHT] == 3
    assert rig.tier.engine.scheduler.num_free_places == 3


def test_what_is_cached_under_another_salt_is_sent():
    rig, cached = Rig(), []
    for number, salt in enumerate((b"a", b"b", b"", b"a", b"b", b"")):
        command = msgspec.structs.replace(reserve(number, range(48)), cache_salt=salt)
        reserved = rig.reserve(command)
        cached.append(reserved.num_cached_tokens)
        assert reserved.chain_hash == hash_chain(range(48), "model", salt=salt)[-1]
        rig.activate(command, reserved)
        rig.run()
    assert cached == [0, 0, 0, 48, 48, 48]


def test_what_is_cached_need_not_be_sent():
    rig = Rig()
    first = reserve(1, range(48))
    rig.activate(first, rig.reserve(first))
    rig.run()
    again = reserve(2, range(48))
    reserved = rig.reserve(again)
    assert (reserved.num_cached_tokens, reserved.block_ids) == (48, [])
    rig.activate(again, reserved)
    rig.run()
    assert rig.tokens[id_of(2)] == expected(again)
    longer = reserve(3, [*range(40), 7, 7])
    assert rig.reserve(longer).num_cached_tokens == 32


def test_blocks_in_flight_are_not_found_by_others():
    rig = Rig()
    rig.reserve(reserve(1, range(48)))
    assert rig.reserve(reserve(2, range(48))).num_cached_tokens == 0


def test_a_continuation_goes_on_at_its_own_position():
    whole = reserve(1, range(20), 10, temperature=0.9, seed=3)
    outputs = expected(whole)
    rig = Rig()
    command = reserve(2, range(20), 10, output=outputs[:4], temperature=0.9, seed=3)
    rig.activate(command, rig.reserve(command))
    tokens = rig.run()
    assert [event.position for event in tokens] == [5, 6, 7, 8, 9]
    assert rig.tokens[id_of(2)] == outputs[4:]


def test_without_room_a_reserve_that_may_not_wait_is_refused_at_once():
    rig = Rig(num_blocks=8)
    rig.reserve(reserve(1, range(100)))
    events = rig.do(reserve(2, range(50))) + rig.step()
    assert codes(events) == {id_of(2): ErrorCode.BUSY}


def test_a_reserve_waits_for_room_in_a_queue_that_holds_nothing():
    rig = Rig(num_blocks=8)
    rig.reserve(reserve(1, range(100)))
    rig.do(reserve(2, range(50, 100), wait_s=30.0))
    assert rig.step() == []
    assert rig.tier.num_waiting == 1
    rig.clock.advance(29.9)
    assert rig.step() == []
    events = rig.do(AbortWork(id_of(1))) + rig.step()
    assert [type(event) for event in events] == [WorkAborted, Reserved]


def test_a_reserve_that_waited_long_enough_is_refused():
    rig = Rig(num_blocks=8)
    rig.reserve(reserve(1, range(100)))
    rig.do(reserve(2, range(50, 100), wait_s=30.0), reserve(3, range(50, 100), wait_s=10.0))
    rig.step()
    rig.clock.advance(10.0)
    assert codes(rig.step()) == {id_of(3): ErrorCode.BUSY}
    rig.clock.advance(20.0)
    assert codes(rig.step()) == {id_of(2): ErrorCode.BUSY}
    assert rig.tier.num_waiting == 0


def test_reserves_of_lower_priority_are_granted_first():
    rig = Rig(num_blocks=8)
    rig.reserve(reserve(1, range(100)))
    waiting = [reserve(number, range(90), wait_s=30.0, priority=p) for number, p in ((2, 0), (3, -1), (4, 0))]
    rig.do(*waiting)
    granted = []
    for number in (1, 3, 2):
        events = rig.do(AbortWork(id_of(number))) + rig.step()
        granted += [event.id for event in events if isinstance(event, Reserved)]
    assert granted == [id_of(3), id_of(2), id_of(4)]


def test_the_queue_is_bounded():
    rig = Rig(num_blocks=8)
    rig.reserve(reserve(1, range(100)))
    events = rig.do(
        *(reserve(2 + number, range(50), wait_s=9.0) for number in range(MAX_QUEUED_RESERVES + 2))
    )
    assert list(codes(events).values()) == [ErrorCode.BUSY] * 2


def test_places_are_taken_by_reserves_too():
    rig = Rig(max_batch=2)
    for number in (1, 2):
        rig.reserve(reserve(number, [number]))
    assert codes(rig.do(reserve(3, [3])) + rig.step()) == {id_of(3): ErrorCode.BUSY}


def test_a_grant_leaves_a_free_block_for_each_running_sequence():
    rig = Rig(num_blocks=8)
    running = reserve(1, range(15), max_tokens=60)
    rig.activate(running, rig.reserve(running))
    assert codes(rig.do(reserve(2, range(100, 196))) + rig.step()) == {id_of(2): ErrorCode.BUSY}
    rig.reserve(reserve(3, range(100, 180)))
    rig.run()
    assert rig.tokens[id_of(1)] == expected(running)[:18], "that block held 16 more"


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens"), [(0, 4), (8 * BLOCK, 1), (CONTEXT, 1), (20, 8 * BLOCK - 19), (100, 1000)]
)
def test_what_could_never_be_served_to_its_end_is_refused(prompt_len, max_tokens):
    rig = Rig(num_blocks=8)
    events = rig.do(reserve(1, range(prompt_len), max_tokens, wait_s=30.0))
    assert codes(events) == {id_of(1): ErrorCode.INVALID}
    assert rig.is_idle()


def test_an_output_may_fill_the_pool_to_the_last_token():
    rig = Rig(num_blocks=8)
    command = reserve(1, range(20), 8 * BLOCK - 20)
    rig.activate(command, rig.reserve(command))
    rig.run()
    assert rig.tokens[id_of(1)] == expected(command)
    assert len(expected(command)) == 108


def test_a_repeated_reserve_changes_nothing_at_any_stage():
    rig = Rig(num_blocks=8)
    blocker = rig.reserve(reserve(9, range(100)))
    assert blocker.block_ids
    command = reserve(1, range(20), wait_s=30.0)
    assert rig.do(command, command) == []
    rig.do(AbortWork(id_of(9)))
    (reserved,) = rig.step()
    assert rig.do(command) + rig.step() == []
    rig.activate(command, reserved)
    assert rig.do(command) == []
    rig.run()
    assert rig.tokens[id_of(1)] == expected(command)
    assert rig.is_idle()


def test_an_abort_returns_the_blocks_of_every_stage():
    rig = Rig()
    running, reserved = reserve(1, range(40), 200), reserve(2, range(40))
    rig.activate(running, rig.reserve(running))
    rig.step()
    rig.reserve(reserved)
    rig.do(reserve(3, range(40)))
    assert rig.do(*(AbortWork(id_of(number)) for number in (3, 2, 1, 1))) == [
        WorkAborted(id_of(number)) for number in (3, 2, 1, 1)
    ]
    assert rig.run() == []
    assert rig.is_idle()


def test_blocks_that_a_writer_may_touch_are_quarantined_until_it_is_quiet():
    rig = Rig()
    warm = reserve(1, range(32))
    rig.activate(warm, rig.reserve(warm))
    rig.run()
    reserved = rig.reserve(reserve(2, range(70)))
    assert reserved.num_cached_tokens == 32
    rig.do(AbortWork(id_of(2), is_quiet=False))
    assert rig.pool.counts[BlockState.QUARANTINED] == len(reserved.block_ids) == 3
    assert rig.pool.num_available == rig.pool.num_blocks - 3
    taken = rig.pool.allocate(rig.pool.num_available)
    assert not set(taken) & set(reserved.block_ids)
    rig.pool.release(taken)
    rig.do(AbortWork(id_of(2)), Quiet(id_of(2)), Quiet(id_of(2)))
    assert rig.is_idle()


def test_commands_after_the_end_are_harmless():
    rig = Rig()
    command = reserve(1, range(20))
    rig.activate(command, rig.reserve(command))
    rig.run()
    late = [Credit(id_of(1), 5), Activate(id_of(1), [FirstToken(0, 0, 1, 0.0)]), Quiet(id_of(1))]
    assert rig.do(*late) == []
    assert rig.run() == []
    assert rig.is_idle()
    rig.reserve(reserve(2, range(20)))
    rig.do(AbortWork(id_of(2)))
    assert rig.do(Activate(id_of(2), [FirstToken(0, 0, 1, 0.0)]), Credit(id_of(2), 5)) == []
    assert rig.is_idle()


def test_credit_holds_one_stream_back_and_no_other():
    rig = Rig()
    slow, other = reserve(1, range(20), 12, credit=2), reserve(2, range(50, 70), 12)
    for command in (slow, other):
        rig.activate(command, rig.reserve(command))
    rig.run()
    assert len(rig.tokens[id_of(1)]) == 3
    assert rig.tokens[id_of(2)] == expected(other)
    rig.do(Credit(id_of(1), 100))
    rig.run()
    assert rig.tokens[id_of(1)] == expected(slow)


@pytest.mark.parametrize("scarce", ["places", "blocks"])
@pytest.mark.parametrize("is_local", [False, True])
def test_readers_that_take_nothing_keep_neither_places_nor_blocks_from_others(scarce, is_local):
    """Those who read on are served in the end."""
    rig = Rig(num_blocks=12, max_batch=2 if scarce == "places" else 8)
    slow = [reserve(number, [number] * 75, 12, credit=2) for number in (1, 2)]
    for command in slow:
        rig.activate(command, rig.reserve(command))
    rig.run()
    assert rig.tier.engine.scheduler.num_suspended == 2
    other = reserve(3, range(40 if scarce == "blocks" else 5), is_local=is_local)
    if is_local:
        rig.tokens[other.id] = []
        assert rig.do(other) == []
    else:
        rig.activate(other, rig.reserve(other))
    rig.run()
    assert rig.tokens[other.id] == expected(other)
    for command in slow:
        rig.do(Credit(command.id, 100))
        rig.run()
        assert rig.tokens[command.id] == expected(command)
    assert rig.is_idle()


def test_credit_that_comes_before_the_seal_counts():
    rig = Rig()
    command = reserve(1, range(20), credit=1)
    reserved = rig.reserve(command)
    rig.do(Credit(id_of(1), 100))
    rig.activate(command, reserved)
    rig.run()
    assert rig.tokens[id_of(1)] == expected(command)


@pytest.mark.parametrize("credit", [0, 3])
def test_a_stream_whose_reader_takes_nothing_for_too_long_is_ended(credit):
    rig = Rig()
    command = reserve(1, range(20), 100, credit=credit)
    rig.activate(command, rig.reserve(command))
    rig.run()
    rig.clock.advance(SUSPEND_LIMIT_S - 1)
    rig.do(Credit(id_of(1), 1))
    rig.run()
    rig.clock.advance(SUSPEND_LIMIT_S - 1)
    assert rig.step() == []
    rig.clock.advance(1)
    assert codes(rig.step()) == {id_of(1): ErrorCode.DEADLINE}
    assert rig.is_idle()
    assert rig.do(Credit(id_of(1), 1)) == []


def test_preempted_streams_go_first_and_new_reserves_do_not_starve_them():
    rig = Rig(num_blocks=12, max_batch=3)
    pair = [reserve(number, [number] * 60, 90) for number in (1, 2)]
    for command in pair:
        rig.activate(command, rig.reserve(command))
    number, num_reserved = 10, 0
    for _ in range(400):
        number += 1
        events = rig.do(reserve(number, [number])) + rig.step()
        num_reserved += sum(isinstance(event, Reserved) for event in events)
        rig.do(AbortWork(id_of(number)))
        if all(len(rig.tokens[command.id]) == 90 for command in pair):
            break
    assert [rig.tokens[command.id] for command in pair] == [expected(command) for command in pair]
    assert num_reserved > 0


def test_logits_that_are_not_finite_fail_only_their_stream():
    rig = Rig()
    pair = [reserve(number, range(20)) for number in (1, 2)]
    for command in pair:
        rig.activate(command, rig.reserve(command))
    rig.step()
    rig.runner.not_finite = id_of(1)
    assert codes(rig.run()) == {id_of(1): ErrorCode.ENGINE}
    assert rig.tokens[id_of(2)] == expected(pair[1])
    assert rig.is_idle()


def test_a_step_that_raises_fails_those_that_it_computed_and_no_reserve():
    rig = Rig()
    pair = [reserve(number, range(20)) for number in (1, 2)]
    for command in pair:
        rig.activate(command, rig.reserve(command))
    later = reserve(3, range(20))
    reserved = rig.reserve(later)
    rig.runner.error = RuntimeError("no memory")
    failed = codes(rig.step())
    assert failed == {id_of(1): ErrorCode.ENGINE, id_of(2): ErrorCode.ENGINE}
    rig.activate(later, reserved)
    rig.run()
    assert rig.tokens[id_of(3)] == expected(later)
    assert rig.is_idle()


def test_a_prompt_is_computed_here_in_chunks_between_the_others_tokens():
    rig = Rig(num_blocks=24, token_budget=16)
    stream, local = reserve(1, range(20), 12), reserve(2, range(100, 150), 6, is_local=True)
    rig.activate(stream, rig.reserve(stream))
    rig.tokens[id_of(2)] = []
    assert rig.do(local) == []
    events = [event for _ in range(4) for event in rig.step()]
    assert [event.id for event in events] == [id_of(1)] * 4 + [id_of(2)]
    rig.run()
    assert [rig.tokens[command.id] for command in (stream, local)] == [expected(stream), expected(local)]
    assert rig.is_idle()


def test_only_a_short_prompt_is_computed_here_unless_it_is_cached():
    rig = Rig(num_blocks=24)
    limits = rig.tier.engine.scheduler.limits
    rig.tier.engine.scheduler.limits = replace(limits, context_len=4000)
    big = BlockPool(200)
    rig.pool = rig.tier.engine.scheduler.pool = big
    long = reserve(1, range(MAX_LOCAL_TOKENS + 1), is_local=True)
    assert codes(rig.do(long)) == {id_of(1): ErrorCode.BUSY}
    for block_hash in hash_chain(range(MAX_LOCAL_TOKENS), "model"):
        (block,) = big.allocate(1)
        big.register(block, block_hash)
        big.release([block])
    assert rig.do(reserve(2, range(MAX_LOCAL_TOKENS + 1), is_local=True)) == []
    rig.do(AbortWork(id_of(2)))
    assert rig.is_idle()


def test_without_a_place_a_local_prompt_is_refused_at_once():
    rig = Rig(max_batch=1)
    rig.reserve(reserve(1, range(20)))
    assert codes(rig.do(reserve(2, range(20), is_local=True))) == {id_of(2): ErrorCode.BUSY}


def test_who_computes_every_prompt_queues_those_that_find_no_place():
    rig = Rig(num_blocks=40, max_batch=1, max_local_tokens=CONTEXT)
    prompts = [reserve(number, range(number, 60 + number), 4, is_local=True) for number in range(3)]
    for prompt in prompts:
        rig.tokens[prompt.id] = []
        assert rig.do(prompt) == []
    rig.run()
    assert [rig.tokens[prompt.id] for prompt in prompts] == [expected(prompt) for prompt in prompts]
    assert rig.is_idle()
