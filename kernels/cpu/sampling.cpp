// A token for each row of logits: the largest logit, or the largest of logit / temperature + Gumbel noise, which is a
// hash of (row key, token id). Knows nothing of torch.
//
// The same arithmetic as kernels/gumbel.py up to the rounding of the logarithms.

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

// The hashed bits of sixteen tokens as 1 - u, u uniform in (0, 1).
v16 complement_of(uint64_t key, uint64_t first) {
    const long8 step{0, 1, 2, 3, 4, 5, 6, 7};
    const v8 low = bits_of(key, first + step), high = bits_of(key, first + 8 + step);
    const v16 complement = (join(low, high) + splat(0.5f)) * splat(0x1p-32f);
    const v16 most = splat(1.0f - 0x1p-24f);
    return select(complement > most, most, complement);
}

v16 noise(v16 complement) { return -log_lanes(-log_complement(complement)); }

// No noise of these tokens is larger: -log(-log(1 - c)) <= -log(c), and c >= 2^e gives -log(c) <= -e · log 2. The
// logarithms themselves are worth their time only where a token could win.
v16 noise_bound(v16 complement) {
    const i16 exponent = ((bits(complement) >> 23) & 0xff) - 127;
    return splat(1e-3f) - converted(exponent) * splat(0.693148f);
}

// `n` values from `at` on; what lies past n can never win.
v16 load_some(const float *row, int64_t at, int64_t n) {
    if (at + LANES <= n) return load(row + at);
    float rest[LANES];
    store(rest, splat(-INFINITY));
    memcpy(rest, row + at, (n - at) * sizeof(float));
    return load(rest);
}

// The largest value of each lane so far, and in which step it came first.
struct Best {
    v16 value = splat(-INFINITY);
    i16 step{};

    INLINE void take(Best &best, v16 value, int64_t step) {
        const i16 is_better = value > best.value;
        best.value = select(is_better, value, best.value);
        best.step = select(is_better, splat(static_cast<int32_t>(step)), best.step);
    }

    // The lowest index of the largest.
    int64_t index() const {
        const float most = max_lanes(value);
        int64_t found = INT64_MAX;
        for (int lane = 0; lane < LANES; lane++)
            if (value[lane] == most) found = std::min<int64_t>(found, int64_t{step[lane]} * LANES + lane);
        return found;
    }
};

bool any(i16 mask) { return max_lanes(converted(select(mask, splat(1), splat(0)))) > 0; }

int64_t largest(const float *row, int64_t n, float &peak) {
    Best best;
    i16 is_nan{};
    for (int64_t at = 0; at < n; at += LANES) {
        const v16 value = load_some(row, at, n);
        is_nan = is_nan | (value != value);
        Best::take(best, value, at / LANES);
    }
    peak = any(is_nan) ? NAN : max_lanes(best.value);
    return std::isfinite(peak) ? best.index() : 0;
}

int64_t largest_with_noise(const float *row, int64_t n, float peak, float temperature, uint64_t key) {
    Best best;
    float floor = -INFINITY;
    for (int64_t at = 0; at < n; at += LANES) {
        const v16 complement = complement_of(key, at);
        const v16 value = (load_some(row, at, n) - splat(peak)) / splat(temperature);
        if (!any(value + noise_bound(complement) > splat(floor))) continue;
        Best::take(best, value + noise(complement), at / LANES);
        floor = max_lanes(best.value);
    }
    return best.index();
}

// Σ e^(x - peak), in double precision after every few steps.
double total(const float *row, int64_t n, float peak) {
    constexpr int64_t STEPS = 16;
    double sum = 0;
    for (int64_t from = 0; from < n; from += STEPS * LANES) {
        v16 part = splat(0.0f);
        for (int64_t at = from; at < std::min(n, from + STEPS * LANES); at += LANES)
            part += exp_lanes(load_some(row, at, n) - splat(peak));
        sum += sum_lanes(part);
    }
    return sum;
}

}  // namespace

// logits [M, N], temperatures [M] (0: the largest), keys [M] -> tokens [M], peaks [M] (NaN where a logit is NaN), totals
// [M]: Σ e^(x - peak). A row whose peak is not finite has token 0.
extern "C" void draw_tokens(const float *logits, const float *temperatures, const int64_t *keys, int64_t *tokens,
                            float *peaks, double *totals, int64_t M, int64_t N) {
#pragma omp parallel for schedule(static) if (M > 1)
    for (int64_t i = 0; i < M; i++) {
        const float *row = logits + i * N;
        tokens[i] = largest(row, N, peaks[i]);
        totals[i] = NAN;
        if (!std::isfinite(peaks[i])) continue;
        totals[i] = total(row, N, peaks[i]);
        if (temperatures[i] > 0)
            tokens[i] = largest_with_noise(row, N, peaks[i], temperatures[i], static_cast<uint64_t>(keys[i]));
    }
}
