"""Tokens drawn on a GPU, with their log-probabilities, without the host in between. Knows nothing of requests.

The rule is engine.sampler's, which is this module's plain twin; the noise is that of kernels.gumbel.

    logits [R, V] ─► amax ─► _find_limits   a program a row: the smallest value that top_k and top_p allow
                         └─► _draw_chunk    a program a (row, chunk of CHUNK tokens): its winner, its sum of exp
                               └─► _choose  a program a row: the winner of winners, packed for one copy to the host

Relative to the row's peak every value is at most 0, so values are ordered as the bits of their magnitudes are, and a
limit is found by bisecting those 31 bits: no sort, whose ties and widths would have to be watched from the host.
Sums of exp are float64 in a fixed order; a row depends on no other.
"""

# Triton compiles annotations of a kernel's arguments, so they have none that mypy could read.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,operator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.layouts import RowChoices

CHUNK = 4096
NUM_WARPS = 8
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_INFINITE = tl.constexpr(0x7F800000)
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


def sample_packed(logits: Tensor, choices: RowChoices) -> Tensor:
    """[3, R] int32, as kernels.ops says."""
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    peaks = logits.amax(-1)
    limits = torch.empty_like(peaks, dtype=torch.int32)
    best = logits.new_empty(num_rows, num_chunks)
    tokens = torch.empty_like(best, dtype=torch.int32)
    sums = torch.empty_like(best, dtype=torch.float64)
    packed = limits.new_empty(3, num_rows)
    _find_limits[(num_rows,)](
        logits,
        peaks,
        choices.temperatures,
        choices.top_ks,
        choices.top_ps,
        limits,
        vocab_size,
        CHUNK=CHUNK,
        num_warps=NUM_WARPS,
    )
    _draw_chunk[(num_rows, num_chunks)](
        logits,
        peaks,
        choices.temperatures,
        choices.keys,
        limits,
        best,
        tokens,
        sums,
        vocab_size,
        num_chunks,
        CHUNK=CHUNK,
        num_warps=NUM_WARPS,
    )
    _choose[(num_rows,)](
        logits,
        peaks,
        best,
        tokens,
        sums,
        packed,
        vocab_size,
        num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks),
    )
    return packed


@triton.jit
def _scaled(logits, column, peak, temperature, vocab_size):
    """Values of a row at most 0, -inf past its end."""
    value = tl.load(logits + column, mask=column < vocab_size, other=float("-inf"))
    return tl.div_rn(value - peak, temperature)


@triton.jit
def _magnitude(value):
    return tl.abs(value).to(tl.int32, bitcast=True)


@triton.jit
def _mass(logits, peak, temperature, limit, vocab_size, COUNTS: tl.constexpr, CHUNK: tl.constexpr):
    """How many of the row's values have a magnitude of at most `limit`, or the sum of their exp; float64."""
    parts = tl.zeros([CHUNK], tl.float64)
    for start in range(0, vocab_size, CHUNK):
        column = start + tl.arange(0, CHUNK)
        value = _scaled(logits, column, peak, temperature, vocab_size)
        is_in = (_magnitude(value) <= limit) & (column < vocab_size)
        if COUNTS:
            parts += is_in.to(tl.float64)
        else:
            parts += tl.where(is_in, tl.exp(value), 0.0).to(tl.float64)
    return tl.sum(parts, 0)


@triton.jit
def _smallest_limit(
    logits, peak, temperature, need, high, vocab_size, COUNTS: tl.constexpr, CHUNK: tl.constexpr
):
    """The smallest limit whose mass is at least `need`; `high`, which is taken to be one, if there is none below."""
    low = high * 0
    while low < high:
        middle = low + (high - low) // 2
        if _mass(logits, peak, temperature, middle, vocab_size, COUNTS, CHUNK) >= need:
            high = middle
        else:
            low = middle + 1
    return high


@triton.jit
def _find_limits(
    logits,  # [R, V] float32
    peaks,  # [R] float32
    temperatures,  # [R] float32
    top_ks,  # [R] int64
    top_ps,  # [R] float64
    limits,  # [R] int32: the largest allowed magnitude, as bits
    vocab_size,
    CHUNK: tl.constexpr,
):
    """Grid (R,). Rows without limits end at once."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    peak = tl.load(peaks + row)
    limit = (row * 0).to(tl.int32) + _INFINITE
    own = logits + row * vocab_size
    if (temperature > 0) & (top_k > 0) & (top_k < vocab_size):
        limit = _smallest_limit(own, peak, temperature, top_k.to(tl.float64), limit, vocab_size, True, CHUNK)
    if (temperature > 0) & (top_p < 1):
        need = top_p * _mass(own, peak, temperature, limit, vocab_size, False, CHUNK)
        limit = _smallest_limit(own, peak, temperature, need, limit, vocab_size, False, CHUNK)
    tl.store(limits + row, limit)


@triton.jit
def _mix(z):
    """splitmix64's finaliser on uint64."""
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def _gumbel_noise(token, key):
    """-log(-log(u)) with 1 - u from the hash; -log1p(-c) as Kahan computes it, exact to the logarithm's rounding."""
    bits = _mix(key + token.to(tl.uint64) * _GOLDEN) >> 32
    complement = (bits.to(tl.uint32).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    complement = tl.minimum(complement, 0.99999994)  # 1 - 2^-24
    u = 1.0 - complement
    is_one = u == 1.0
    ratio = tl.div_rn(complement, tl.where(is_one, 1.0, 1.0 - u))
    return -tl.log(tl.where(is_one, complement, -tl.log(u) * ratio))


@triton.jit
def _draw_chunk(
    logits,  # [R, V] float32
    peaks,  # [R] float32
    temperatures,  # [R] float32
    keys,  # [R] int64
    limits,  # [R] int32
    best,  # [R, C] float32: the largest score
    tokens,  # [R, C] int32: the first token that has it
    sums,  # [R, C] float64: of exp(logit - peak)
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
):
    """Grid (R, C)."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    peak = tl.load(peaks + row)
    temperature = tl.load(temperatures + row)
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    limit = tl.load(limits + row)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    own = logits + row * vocab_size
    place = row * num_chunks + chunk

    is_drawn = temperature > 0
    value = _scaled(own, column, peak, tl.where(is_drawn, temperature, 1.0), vocab_size)
    score = value + tl.where(is_drawn, _gumbel_noise(column, key), 0.0)
    score = tl.where(_magnitude(value) <= limit, score, float("-inf"))
    top = tl.max(score, 0)
    tl.store(best + place, top)
    tl.store(tokens + place, tl.min(tl.where(score == top, column, _NO_TOKEN), 0))
    weights = tl.exp(_scaled(own, column, peak, 1.0, vocab_size))
    tl.store(sums + place, tl.sum(weights.to(tl.float64), 0))


@triton.jit
def _choose(
    logits,  # [R, V] float32
    peaks,  # [R] float32
    best,  # [R, C] float32
    tokens,  # [R, C] int32
    sums,  # [R, C] float64
    packed,  # [3, R] int32: token, bits of its log-probability, whether the row is valid
    vocab_size,
    num_chunks,
    CHUNKS: tl.constexpr,
):
    """Grid (R,)."""
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    chunk = tl.arange(0, CHUNKS)
    mask = chunk < num_chunks
    place = row * num_chunks + chunk
    score = tl.load(best + place, mask=mask, other=float("-inf"))
    token = tl.load(tokens + place, mask=mask, other=_NO_TOKEN)
    total = tl.sum(tl.load(sums + place, mask=mask, other=0.0), 0)
    peak = tl.load(peaks + row)
    is_valid = tl.abs(peak) < float("inf")
    winner = tl.min(tl.where(score == tl.max(score, 0), token, _NO_TOKEN), 0)
    winner = tl.where(is_valid, winner, 0)
    chosen = tl.load(logits + row * vocab_size + winner) - peak
    logprob = (chosen.to(tl.float64) - tl.log(total)).to(tl.float32)
    tl.store(packed + row, winner)
    tl.store(packed + num_rows + row, logprob.to(tl.int32, bitcast=True))
    tl.store(packed + 2 * num_rows + row, is_valid.to(tl.int32))
