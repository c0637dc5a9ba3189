// The largest of logit + Gumbel noise in each row; the noise is a hash of (row key, token id). Knows nothing of torch.
//
// The same arithmetic as kernels/gumbel.py up to the rounding of the logarithms, in one pass without intermediates.

#include <algorithm>
#include <cmath>

#include "vector.h"

namespace {

typedef uint64_t long8 __attribute__((vector_size(64)));

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15, MIX_1 = 0xBF58476D1CE4E5B9, MIX_2 = 0x94D049BB133111EB;

long8 mix(long8 z) {
    z = (z ^ (z >> 30)) * MIX_1;
    z = (z ^ (z >> 27)) * MIX_2;
    return z ^ (z >> 31);
}

// 32 hashed bits of eight token ids as floats.
v8 bits_of(uint64_t key, long8 ids) { return __builtin_convertvector(mix(key + ids * GOLDEN) >> 32, v8); }

// Cephes' logf; x positive and normal.
v16 log_lanes(v16 x) {
    const i16 pattern = bits(x);
    i16 exponent = ((pattern >> 23) & 0xff) - 126;
    v16 m = floats((pattern & 0x007fffff) | 0x3f000000);  // in [0.5, 1)
    i16 is_low = m < splat(0.70710678118654752440f);
    exponent += is_low;
    m = m + select(is_low, m, splat(0.0f)) - splat(1.0f);
    v16 z = m * m;
    v16 p = splat(7.0376836292e-2f);
    p = p * m - splat(1.1514610310e-1f);
    p = p * m + splat(1.1676998740e-1f);
    p = p * m - splat(1.2420140846e-1f);
    p = p * m + splat(1.4249322787e-1f);
    p = p * m - splat(1.6668057665e-1f);
    p = p * m + splat(2.0000714765e-1f);
    p = p * m - splat(2.4999993993e-1f);
    p = p * m + splat(3.3333331174e-1f);
    v16 e = converted(exponent);
    v16 y = p * m * z + e * splat(-2.12194440e-4f) - splat(0.5f) * z;
    return m + y + e * splat(0.693359375f);
}

// log(1 - v) for 0 < v < 1, accurate for small v.
v16 log_complement(v16 v) {
    v16 u = splat(1.0f) - v;
    v16 lost = splat(1.0f) - u;
    i16 is_tiny = lost == splat(0.0f);
    v16 scaled = log_lanes(u) * (v / select(is_tiny, splat(1.0f), lost));
    return select(is_tiny, -v, scaled);
}

v16 noise(uint64_t key, uint64_t first) {
    const long8 step{0, 1, 2, 3, 4, 5, 6, 7};
    const v8 low = bits_of(key, first + step), high = bits_of(key, first + 8 + step);
    v16 complement = (join(low, high) + splat(0.5f)) * splat(0x1p-32f);
    const v16 largest = splat(1.0f - 0x1p-24f);
    complement = select(complement > largest, largest, complement);
    return -log_lanes(-log_complement(complement));
}

int64_t row_argmax(const float *scaled, uint64_t key, int64_t n) {
    v16 best = splat(-INFINITY);
    i16 best_at{};
    for (int64_t at = 0; at < n; at += LANES) {
        v16 value;
        if (at + LANES <= n) {
            value = load(scaled + at);
        } else {
            float rest[LANES];
            store(rest, splat(-INFINITY));
            memcpy(rest, scaled + at, (n - at) * sizeof(float));
            value = load(rest);
        }
        value += noise(key, at);
        i16 is_better = value > best;
        best = select(is_better, value, best);
        best_at = select(is_better, splat(static_cast<int32_t>(at / LANES)), best_at);
    }
    int64_t winner = 0;
    for (int lane = 0; lane < LANES; lane++) {
        const int64_t token = static_cast<int64_t>(best_at[lane]) * LANES + lane;
        const int64_t holder = winner % LANES;
        if (lane == 0 || best[lane] > best[holder] || (best[lane] == best[holder] && token < winner)) winner = token;
    }
    return winner;
}

}  // namespace

extern "C" void gumbel_argmax_f32(const float *scaled, const int64_t *keys, int64_t *tokens, int64_t M, int64_t N) {
#pragma omp parallel for schedule(static) if (M > 1)
    for (int64_t row = 0; row < M; row++)
        tokens[row] = row_argmax(scaled + row * N, static_cast<uint64_t>(keys[row]), N);
}
