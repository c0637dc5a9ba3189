// A token for each row of logits: the largest logit, or the largest of logit / temperature + Gumbel noise, which is a
// hash of (row key, token id), among those that top_k and top_p allow. And the largest few. Knows nothing of torch.
//
// The same arithmetic as kernels/gumbel.py up to the rounding of the logarithms.

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "crew.h"
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

// Values relative to the peak are at most 0, so they are ordered as the bits of their magnitudes are; INFINITE allows all.
constexpr int32_t INFINITE = 0x7f800000;

i16 magnitudes(v16 value) { return bits(value) & 0x7fffffff; }

int64_t largest_with_noise(const float *row, int64_t n, float peak, float temperature, uint64_t key, int32_t limit) {
    Best best;
    float floor = -INFINITY;
    for (int64_t at = 0; at < n; at += LANES) {
        const v16 complement = complement_of(key, at);
        v16 value = (load_some(row, at, n) - splat(peak)) / splat(temperature);
        value = select(splat(limit) < magnitudes(value), splat(-INFINITY), value);
        if (!any(value + noise_bound(complement) > splat(floor))) continue;
        Best::take(best, value + noise(complement), at / LANES);
        floor = max_lanes(best.value);
    }
    return best.index();
}

// How many values have magnitudes of one size, and Σ e^value of them. A bucket holds those that agree in the first
// eleven bits: what separates two of its members is found by sorting it.
struct Histogram {
    static constexpr int SHIFT = 20, SIZE = 1 << (31 - SHIFT);
    int64_t counts[SIZE] = {};
    double masses[SIZE] = {};
};

using Member = std::pair<int32_t, float>;  // magnitude, e^value

// Calls `visit(magnitude, e^value)` for each value of a row.
template <class Visit>
void visit_values(const float *row, int64_t n, float peak, float temperature, Visit visit) {
    for (int64_t at = 0; at < n; at += LANES) {
        const v16 value = (load_some(row, at, n) - splat(peak)) / splat(temperature);
        const i16 magnitude = magnitudes(value);
        const v16 power = exp_lanes(value);
        const int64_t end = std::min<int64_t>(LANES, n - at);
        for (int64_t lane = 0; lane < end; lane++) visit(magnitude[lane], power[lane]);
    }
}

struct Draw {
    const float *row;
    int64_t n;
    float peak, temperature;

    // The members of a bucket that are no larger than `limit`, in order.
    std::vector<Member> members(int bucket, int32_t limit) const {
        std::vector<Member> found;
        visit_values(row, n, peak, temperature, [&](int32_t magnitude, float power) {
            if (magnitude >> Histogram::SHIFT == bucket && magnitude <= limit) found.emplace_back(magnitude, power);
        });
        std::sort(found.begin(), found.end());
        return found;
    }

    // The magnitude of the smallest value allowed: the k largest are (0: all), and of those the fewest that have the
    // part p of their mass; equals of the last one too.
    int32_t limit(int64_t k, double p) const {
        Histogram sizes;
        visit_values(row, n, peak, temperature, [&](int32_t magnitude, float power) {
            sizes.counts[magnitude >> Histogram::SHIFT]++;
            sizes.masses[magnitude >> Histogram::SHIFT] += power;
        });
        int32_t most = INFINITE;
        double whole = 0;
        if (k > 0 && k < n) {
            int bucket = 0;
            for (; sizes.counts[bucket] < k; bucket++) {
                k -= sizes.counts[bucket];
                whole += sizes.masses[bucket];
            }
            const auto last = members(bucket, INFINITE);
            most = last[k - 1].first;
            for (const auto &[magnitude, power] : last) whole += magnitude <= most ? power : 0;
        } else {
            for (double mass : sizes.masses) whole += mass;
        }
        return p < 1 ? nucleus(sizes, p * whole, most) : most;
    }

    int32_t nucleus(const Histogram &sizes, double need, int32_t most) const {
        const int end = most >> Histogram::SHIFT;
        int bucket = 0;
        for (; bucket < end && sizes.masses[bucket] < need; bucket++) need -= sizes.masses[bucket];
        int32_t limit = most;
        for (const auto &[magnitude, power] : members(bucket, most)) {
            limit = magnitude;
            need -= power;
            if (need <= 0) break;
        }
        return limit;
    }
};

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

// logits [M, N], temperatures [M] (0: the largest), top_ks [M] (0: no limit), top_ps [M], keys [M] -> tokens [M], peaks
// [M] (NaN where a logit is NaN), totals [M]: Σ e^(x - peak). A row whose peak is not finite has token 0.
extern "C" void draw_tokens(const float *logits, const float *temperatures, const int64_t *top_ks, const double *top_ps,
                            const int64_t *keys, int64_t *tokens, float *peaks, double *totals, int64_t M, int64_t N) {
    const Shift shift;
    share(M, [&](int64_t i) {
        const float *row = logits + i * N;
        tokens[i] = largest(row, N, peaks[i]);
        totals[i] = NAN;
        if (!std::isfinite(peaks[i])) return;
        totals[i] = total(row, N, peaks[i]);
        if (!(temperatures[i] > 0)) return;
        const bool is_limited = (top_ks[i] > 0 && top_ks[i] < N) || top_ps[i] < 1;
        const Draw draw{row, N, peaks[i], temperatures[i]};
        const int32_t limit = is_limited ? draw.limit(top_ks[i], top_ps[i]) : INFINITE;
        tokens[i] =
            largest_with_noise(row, N, peaks[i], temperatures[i], static_cast<uint64_t>(keys[i]), limit);
    });
}

// logits [M, N], K <= N -> values [M, K], ids [M, K]: the largest, of equals the lowest ids, in that order.
extern "C" void largest_tokens(const float *logits, float *values, int64_t *ids, int64_t M, int64_t N, int64_t K) {
    share(M, [&](int64_t i) {
        const float *row = logits + i * N;
        const auto is_before = [](const std::pair<float, int64_t> &a, const std::pair<float, int64_t> &b) {
            return a.first != b.first ? a.first > b.first : a.second < b.second;
        };
        std::vector<std::pair<float, int64_t>> best;  // a heap whose front is the one to go next
        for (int64_t at = 0; at < K; at++) best.emplace_back(row[at], at);
        std::make_heap(best.begin(), best.end(), is_before);
        for (int64_t at = K / LANES * LANES; at < N; at += LANES) {
            const v16 value = load_some(row, at, N);
            if (!any(value > splat(best.front().first))) continue;
            for (int64_t lane = std::max<int64_t>(0, K - at); lane < std::min<int64_t>(LANES, N - at); lane++) {
                if (!(value[lane] > best.front().first)) continue;
                std::pop_heap(best.begin(), best.end(), is_before);
                best.back() = {value[lane], at + lane};
                std::push_heap(best.begin(), best.end(), is_before);
            }
        }
        std::sort_heap(best.begin(), best.end(), is_before);
        for (int64_t at = 0; at < K; at++) {
            values[i * K + at] = best[at].first;
            ids[i * K + at] = best[at].second;
        }
    });
}
