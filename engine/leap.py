"""Many decode steps at once, for a simulator: what a scheduler does in them, without looking at each. No torch.

step    1   2   3  ...   n         n = num_steady_steps(): nobody joins, waits, stalls or ends before the last
A      [ x   x   x  ...  end ]     leap(n) leaves the scheduler as n rounds of schedule() and commit() do
B      [ x   x   x  ...   x  ]
"""

from engine.scheduler import Progress, Sampled, Scheduler, Work


def num_steady_steps(scheduler: Scheduler) -> int:
    """For how many steps from now on every running sequence makes a token and nothing else happens: nobody waits or
    computes a prompt, has no credit or block, and none ends before the last of them. 0 when that is not so."""
    running = scheduler.running
    if not running or scheduler.waiting or len(running) > scheduler.limits.token_budget:
        return 0
    context_len, num_steps = scheduler.limits.context_len, 1 << 30
    for sequence in running:
        num_tokens = len(sequence.tokens)
        if num_tokens - sequence.num_computed != 1 or sequence.guide is not None:
            return 0
        left = sequence.params.max_tokens - num_tokens + sequence.num_prompt_tokens
        num_steps = min(num_steps, left, context_len - num_tokens, sequence.credit)
    num_available = scheduler.pool.num_available
    if (
        len(running) * (num_steps // scheduler.limits.block_size + 1) > num_available
    ):  # at most so many are lacking
        while num_steps > 0 and _num_lacking(scheduler, num_steps) > num_available:
            num_steps //= 2
    return max(num_steps, 0)


def _num_lacking(scheduler: Scheduler, num_steps: int) -> int:
    """Blocks that the running sequences need for that many tokens each, beyond those that they have."""
    size = scheduler.limits.block_size
    return sum(
        max(0, (len(sequence.tokens) + num_steps - 2) // size + 1 - len(sequence.block_ids))
        for sequence in scheduler.running
    )


def leap(scheduler: Scheduler, num_steps: int, token: Sampled) -> list[Progress]:
    """What that many rounds of schedule() and commit() do when each makes `token` of every sequence: at most
    num_steady_steps(), and nobody may stop at that token. Those that end with the last of them."""
    scheduler.end_waits(
        [Work(sequence, 1) for sequence in scheduler.running if sequence.waits_since_s is not None]
    )
    size, context_len = scheduler.limits.block_size, scheduler.limits.context_len
    new_tokens = [token.token_id] * num_steps
    ended = []
    for sequence in scheduler.running:
        computed_before = sequence.num_computed
        num_lacking = (len(sequence.tokens) + num_steps - 2) // size + 1 - len(sequence.block_ids)
        if num_lacking > 0:
            fresh = scheduler.pool.allocate(num_lacking)
            assert fresh is not None, "fewer blocks than num_steady_steps() counted"
            sequence.block_ids += fresh
        sequence.tokens += new_tokens
        sequence.num_computed += num_steps
        scheduler.register_full_blocks(sequence, computed_before)
        sequence.credit -= num_steps
        reason = sequence.finish_reason(context_len)
        if reason is not None:
            ended.append(Progress(sequence, token, reason))
    return ended
