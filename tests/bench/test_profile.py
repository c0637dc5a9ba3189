"""What a profile concludes from requests to a served tandem."""

import pytest

from bench import profile
from bench.client import Outcome
from bench.simulation.costs import FEW_TOKENS, HostCosts, LinkCosts, StepCosts
from core.errors import EngineFailed

COSTS = StepCosts(((1, 0.01), (32, 0.03), (512, 0.4)), ((1, 0.001), (64, 0.004)), 1e-7, 1e-6)
LINK = LinkCosts(front_s=0.01, step_overhead_s=0.002, token_overhead_s=0.0005)


def beside(few: float, many: float, starts_s: float = 1.0) -> list[Outcome]:
    """Streams and prompts of a system whose steps take so much longer than COSTS say."""
    num_streams = profile.NUM_STREAMS
    context = profile.PROBE_PROMPT + profile.STREAM_OUTPUT / 2
    gap_s = few * COSTS.step_s(num_streams, num_streams, 0.0, num_streams * context)
    gap_s += LINK.step_overhead_s + num_streams * LINK.token_overhead_s
    prompt_s = many * COSTS.step_s(512, 1, 512 * 513 / 2, 0.0)
    way_s = LINK.front_s + 3 * LINK.hop_s + LINK.token_s
    streams = [Outcome(sent_s=0.0, first_token_s=0.1, gaps_s=[gap_s] * 300) for _ in range(num_streams)]
    prompts = [Outcome(sent_s=starts_s, first_token_s=way_s + (n + 1) * prompt_s) for n in range(4)]
    return [*streams, *prompts]


def test_streams_and_prompts_tell_each_by_how_much_steps_are_slower():
    assert profile._contended(COSTS, LINK, beside(1.3, 1.7)) == pytest.approx((1.3, 1.7))
    assert profile._contended(COSTS, LINK, beside(0.5, 0.8)) == (1.0, 1.0)


def test_streams_that_ended_before_the_prompts_say_nothing():
    with pytest.raises(EngineFailed, match="had ended"):
        profile._contended(COSTS, LINK, beside(1.0, 1.0, starts_s=1000.0))


def test_contended_steps_are_slowed_by_their_size_and_others_alike():
    made = profile.Slowdown(1.1, 2.0, 3.0).of(HostCosts.same(COSTS))
    for num_tokens in (1, FEW_TOKENS):
        assert made.contended.step_s(num_tokens, 1, 0.0, 100.0) == pytest.approx(
            2.0 * COSTS.step_s(num_tokens, 1, 0.0, 100.0)
        )
    assert made.contended.step_s(512, 0, 1000.0, 0.0) == pytest.approx(
        3.0 * COSTS.step_s(512, 0, 1000.0, 0.0)
    )
    assert made.alone.step_s(512, 1, 10.0, 10.0) == pytest.approx(1.1 * COSTS.step_s(512, 1, 10.0, 10.0))
    assert made.helped == made.alone
