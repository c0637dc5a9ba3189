// 4- and 8-bit weights in groups of 32, as GGUF's Q4_0, Q4_1 and Q8_0 have them: see matrix.h.
//
// x is rounded in the same groups to two signed bytes, x = dx · (254 · high + low): one byte would cost a percent of
// perplexity, as a few large values set the step for all others. Products are summed as integers, and each group's sum is
// scaled once:
//
//     y[n] = Σ over groups  d[n] · dx · (254 · Σ q·high + Σ q·low)  +  m[n] · Σ x        w = d·q + m

#include <algorithm>
#include <cmath>
#include <vector>

#include "crew.h"
#include "panel.h"
#include "quantized.h"

namespace {

constexpr int64_t AHEAD_BYTES = 2048;
constexpr int STEP = 254;  // of high, in steps of low

struct Input {  // one group of one row of x
    float scale, sum;  // sum of x itself
    int32_t total;     // sum of 254 · high + low
    int8_t high[GROUP], low[GROUP];
};

// Sums of a group for sixteen outputs, as floats. `Units` holds the group's weights as the products take them.
#if defined(__AVX512VNNI__)

struct Units {
    __m512i quads[QUADS];  // unsigned
};

INLINE __m512i quad_of(const int8_t *values, int q) {
    int32_t four;
    memcpy(&four, values + 4 * q, sizeof four);
    return _mm512_set1_epi32(four);
}

INLINE Units unpack(const Group4 &group) {
    Units units;
    const __m512i mask = _mm512_set1_epi8(15);
    for (int j = 0; j < QUADS / 2; j++) {
        const __m512i both = _mm512_loadu_si512(group.pairs[j]);
        units.quads[2 * j] = _mm512_and_si512(both, mask);
        units.quads[2 * j + 1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
    }
    return units;
}

INLINE Units unpack(const Group8 &group) {
    Units units;
    for (int q = 0; q < QUADS; q++)
        units.quads[q] = _mm512_xor_si512(_mm512_loadu_si512(group.quads[q]), _mm512_set1_epi8(-128));
    return units;
}

template <bool IS_SIGNED>
INLINE v16 sums(const Units &units, const Input &x) {
    __m512i high = _mm512_setzero_si512(), low = high;
    for (int q = 0; q < QUADS; q++) {
        high = _mm512_dpbusd_epi32(high, units.quads[q], quad_of(x.high, q));
        low = _mm512_dpbusd_epi32(low, units.quads[q], quad_of(x.low, q));
    }
    __m512i sum = _mm512_add_epi32(_mm512_mullo_epi32(high, _mm512_set1_epi32(STEP)), low);
    if (IS_SIGNED) sum = _mm512_sub_epi32(sum, _mm512_set1_epi32(128 * x.total));
    return (v16)_mm512_cvtepi32_ps(sum);
}

#elif defined(__AVX2__)

struct Units {
    __m256i quads[QUADS][2];
};

INLINE __m256i quad_of(const int8_t *values, int q) {
    int32_t four;
    memcpy(&four, values + 4 * q, sizeof four);
    return _mm256_set1_epi32(four);
}

INLINE __m256i bytes_at(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }

INLINE Units unpack(const Group4 &group) {
    Units units;
    const __m256i mask = _mm256_set1_epi8(15);
    for (int j = 0; j < QUADS / 2; j++)
        for (int half = 0; half < 2; half++) {
            const __m256i both = bytes_at(group.pairs[j][8 * half]);
            units.quads[2 * j][half] = _mm256_and_si256(both, mask);
            units.quads[2 * j + 1][half] = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
        }
    return units;
}

// Both bytes of x for both halves of the panel: what is read serves as often as it can. w <= 15: all sixteen products
// of an output fit sixteen bits.
template <bool IS_SIGNED>
INLINE v16 sums(const Units &units, const Input &x) {
    static_assert(!IS_SIGNED, "eight bits are multiplied as floats here");
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i high[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()}, low[2] = {high[0], high[0]};
    for (int q = 0; q < QUADS; q++) {
        const __m256i high_quad = quad_of(x.high, q), low_quad = quad_of(x.low, q);
        for (int half = 0; half < 2; half++) {
            const __m256i w = units.quads[q][half];
            high[half] = _mm256_add_epi16(high[half], _mm256_maddubs_epi16(w, high_quad));
            low[half] = _mm256_add_epi16(low[half], _mm256_maddubs_epi16(w, low_quad));
        }
    }
    v8 halves[2];
    for (int half = 0; half < 2; half++) {
        const __m256i whole = _mm256_madd_epi16(high[half], ones), rest = _mm256_madd_epi16(low[half], ones);
        const __m256i sum = _mm256_add_epi32(_mm256_mullo_epi32(whole, _mm256_set1_epi32(STEP)), rest);
        halves[half] = (v8)_mm256_cvtepi32_ps(sum);
    }
    return join(halves[0], halves[1]);
}

#else

struct Units {
    int16_t quads[QUADS][LANES][4];
};

INLINE Units unpack(const Group4 &group) {
    Units units;
    for (int q = 0; q < QUADS; q++)
        for (int n = 0; n < LANES; n++)
            for (int i = 0; i < 4; i++) units.quads[q][n][i] = group.pairs[q / 2][n][i] >> (q % 2 * 4) & 15;
    return units;
}

template <bool IS_SIGNED>
INLINE v16 sums(const Units &units, const Input &x) {
    float all[LANES];
    for (int n = 0; n < LANES; n++) {
        int32_t sum = 0;
        for (int q = 0; q < QUADS; q++)
            for (int i = 0; i < 4; i++)
                sum += units.quads[q][n][i] * (STEP * x.high[4 * q + i] + x.low[4 * q + i]);
        all[n] = static_cast<float>(sum);
    }
    return load(all);
}

#endif

INLINE void gather(v16 &acc, const Group4 &group, const Units &units, v16 scales, v16 offsets, const Input &x) {
    acc += sums<false>(units, x) * (scales * splat(x.scale));
    acc += offsets * splat(x.sum);
}

INLINE v16 offsets_of(const Group4 &group) { return load_halves(group.offsets); }

#ifdef __AVX512VNNI__
INLINE void gather(v16 &acc, const Group8 &group, const Units &units, v16 scales, v16, const Input &x) {
    acc += sums<true>(units, x) * (scales * splat(x.scale));
}

INLINE v16 offsets_of(const Group8 &) { return splat(0.0f); }
#endif

void round_group(const float *x, Input &out) {
    v16 low = load(x), high = load(x + LANES);
    const v16 most = maximum(maximum(low, -low), maximum(high, -high));
    const float peak = max_lanes(most);
    out.sum = sum_lanes(low + high);
    out.total = 0;
    memset(out.high, 0, sizeof out.high);
    memset(out.low, 0, sizeof out.low);
    if (out.sum != out.sum || !(peak < INFINITY)) {  // what is not finite must not become a number
        out.scale = NAN;
        return;
    }
    out.scale = peak / (127.0f * STEP);
    if (!(peak > 1e-30f)) return;
    const v16 magic = splat(12582912.0f), inverse = splat(127.0f / peak);  // 1.5 * 2^23: adding it rounds
    float whole[GROUP], rest[GROUP];
    for (int i = 0; i < GROUP; i += LANES) {
        const v16 scaled = load(x + i) * inverse, nearest = scaled + magic - magic;
        store(whole + i, nearest);
        store(rest + i, (scaled - nearest) * splat(static_cast<float>(STEP)) + magic - magic);
    }
    for (int i = 0; i < GROUP; i++) {
        out.high[i] = static_cast<int8_t>(whole[i]);
        out.low[i] = static_cast<int8_t>(rest[i]);
        out.total += STEP * out.high[i] + out.low[i];
    }
}

template <typename Group>
struct Product {
    const Input *x;        // [M, groups]
    const Group *packed;   // [N/16][groups]
    const float *bias;
    float *y;
    int64_t groups, N;
};

template <typename Group, int ROWS, int PANELS, bool FIRST>
void tile(const Product<Group> &p, int64_t row, int64_t panel) {
    const Input *x = p.x + row * p.groups;
    v16 acc[ROWS][PANELS];
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < PANELS; j++) acc[i][j] = splat(0.0f);
    for (int64_t g = 0; g < p.groups; g++)
        for (int j = 0; j < PANELS; j++) {
            const Group &group = p.packed[(panel + j) * p.groups + g];
            if (FIRST)
                for (size_t at = 0; at < sizeof(Group); at += 64)
                    __builtin_prefetch(reinterpret_cast<const char *>(&group) + AHEAD_BYTES + at);
            const Units units = unpack(group);
            const v16 scales = load_halves(group.scales), offsets = offsets_of(group);
            for (int i = 0; i < ROWS; i++) gather(acc[i][j], group, units, scales, offsets, x[i * p.groups + g]);
        }
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < PANELS; j++) {
            const int64_t column = (panel + j) * LANES, width = std::min<int64_t>(LANES, p.N - column);
            write(p.y + (row + i) * p.N + column, acc[i][j], p.bias ? p.bias + column : nullptr, width);
        }
}

constexpr int MAX_ROWS = 4, STREAMS = 4;

template <typename Group>
void panels_from(const Product<Group> &p, int64_t M, int64_t panel, int64_t count) {
    if (M == 1 && count == STREAMS) return tile<Group, 1, STREAMS, true>(p, 0, panel);
    for (int64_t j = panel; j < panel + count; j++) {
        const int64_t second = std::min<int64_t>(MAX_ROWS, M);
        by_rows<MAX_ROWS>(0, second, [&](auto n, int64_t row) { tile<Group, n, 1, true>(p, row, j); });
        by_rows<MAX_ROWS>(second, M, [&](auto n, int64_t row) { tile<Group, n, 1, false>(p, row, j); });
    }
}

#ifdef __AVX512VNNI__
template <typename Group>
bool widen_rows(const Product<Group> &, int64_t) {
    return false;
}
#else
void multiply_widened(const Product<Group4> &p, int64_t M);
constexpr int64_t WIDEN_ROWS = 12;

bool widen_rows(const Product<Group4> &p, int64_t M) {
    if (M < WIDEN_ROWS) return false;
    multiply_widened(p, M);
    return true;
}
#endif

constexpr int64_t BLOCK_ROWS = 256;  // rows of x worked on together stay in the cache

template <typename Group>
void multiply_groups(const Matrix &matrix, const Input *x, float *y, int64_t M) {
    const int64_t groups = matrix.K / GROUP, num_panels = (matrix.N + LANES - 1) / LANES;
    const int64_t steps = (num_panels + STREAMS - 1) / STREAMS;
    for (int64_t first = 0; first < M; first += BLOCK_ROWS) {
        const Product<Group> p{x + first * groups, static_cast<const Group *>(matrix.packed), matrix.bias,
                               y + first * matrix.N, groups, matrix.N};
        const int64_t rows = std::min<int64_t>(BLOCK_ROWS, M - first);
        if (widen_rows(p, rows)) continue;
        share(steps, [&](int64_t step) {
            const int64_t panel = step * STREAMS;
            panels_from(p, rows, panel, std::min<int64_t>(STREAMS, num_panels - panel));
        });
    }
}

#ifndef __AVX512VNNI__

INLINE v16 widen(const int8_t *p) {
#ifdef __AVX2__
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    return join((v8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
                (v8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes))));
#else
    float wide[LANES];
    for (int i = 0; i < LANES; i++) wide[i] = p[i];
    return load(wide);
#endif
}

// ROWS rows of x by one panel of eight-bit weights, as floats.
template <int ROWS>
APART void float_tile(const Matrix &matrix, const float *x, float *y, int64_t panel) {
    const int64_t groups = matrix.K / GROUP, column = panel * LANES;
    const Group8 *packed = static_cast<const Group8 *>(matrix.packed) + panel * groups;
    v16 acc[ROWS];
    for (int i = 0; i < ROWS; i++) acc[i] = splat(0.0f);
    for (int64_t g = 0; g < groups; g++) {
        const v16 scales = load_halves(packed[g].scales);
        for (size_t at = 0; at < sizeof(Group8); at += 64)
            __builtin_prefetch(reinterpret_cast<const char *>(packed + g) + AHEAD_BYTES + at);
        for (int k = 0; k < GROUP; k++) {
            const v16 w = widen(packed[g].rows[k]) * scales;
            for (int i = 0; i < ROWS; i++) acc[i] += w * splat(x[i * matrix.K + g * GROUP + k]);
        }
    }
    const float *bias = matrix.bias ? matrix.bias + column : nullptr;
    for (int i = 0; i < ROWS; i++)
        write(y + i * matrix.N + column, acc[i], bias, std::min<int64_t>(LANES, matrix.N - column));
}

// Many rows by one panel of four-bit weights. The integers of a group's sum fit a float (15 · 254.5 · 127 · 32 < 2^24),
// so floats give the same sums to the bit, and pay where widening a panel once serves many rows.
template <int ROWS>
APART void whole_tile(const Product<Group4> &p, const float *wide, const float *x, int64_t row, int64_t panel) {
    const int64_t K = p.groups * GROUP;
    const Group4 *packed = p.packed + panel * p.groups;
    v16 acc[ROWS];
    for (int i = 0; i < ROWS; i++) acc[i] = splat(0.0f);
    for (int64_t g = 0; g < p.groups; g++) {
        v16 part[ROWS];
        for (int i = 0; i < ROWS; i++) part[i] = splat(0.0f);
        for (int k = 0; k < GROUP; k++) {
            const v16 w = load(wide + (g * GROUP + k) * LANES);
            for (int i = 0; i < ROWS; i++) part[i] += w * splat(x[(row + i) * K + g * GROUP + k]);
        }
        const v16 scales = load_halves(packed[g].scales), offsets = load_halves(packed[g].offsets);
        for (int i = 0; i < ROWS; i++) {
            const Input &input = p.x[(row + i) * p.groups + g];
            acc[i] += part[i] * (scales * splat(input.scale));
            acc[i] += offsets * splat(input.sum);
        }
    }
    const int64_t column = panel * LANES, width = std::min<int64_t>(LANES, p.N - column);
    for (int i = 0; i < ROWS; i++)
        write(p.y + (row + i) * p.N + column, acc[i], p.bias ? p.bias + column : nullptr, width);
}

void multiply_widened(const Product<Group4> &p, int64_t M) {
    constexpr int ROWS = 6;
    static thread_local std::vector<float> whole;
    const int64_t K = p.groups * GROUP, num_panels = (p.N + LANES - 1) / LANES;
    if (static_cast<int64_t>(whole.size()) < M * K) whole.resize(M * K);
    float *x = whole.data();
    for (int64_t n = 0; n < M * p.groups; n++)
        for (int k = 0; k < GROUP; k++) x[n * GROUP + k] = static_cast<float>(STEP * p.x[n].high[k] + p.x[n].low[k]);
    share(num_panels, [&](int64_t panel) {
        static thread_local std::vector<float> wide;
        if (static_cast<int64_t>(wide.size()) < K * LANES) wide.resize(K * LANES);
        for (int64_t g = 0; g < p.groups; g++) {
            const Group4 &group = p.packed[panel * p.groups + g];
            for (int k = 0; k < GROUP; k++) {  // an output's four bytes are one integer lane
                const i16 four = bits(load(reinterpret_cast<const float *>(group.pairs[k / 8])));
                const i16 value = (four >> (8 * (k % 4) + 4 * (k / 4 % 2))) & 15;
                store(wide.data() + (g * GROUP + k) * LANES, converted(value));
            }
        }
        const float *weights = wide.data();
        by_rows<ROWS>(0, M, [&](auto n, int64_t row) { whole_tile<n>(p, weights, x, row, panel); });
    });
}

void multiply_bytes(const Matrix &matrix, const float *x, float *y, int64_t M) {
    constexpr int ROWS = 6;
    const int64_t num_panels = (matrix.N + LANES - 1) / LANES;
    share(num_panels, [&](int64_t panel) {
        by_rows<ROWS>(0, M, [&](auto n, int64_t row) {
            float_tile<n>(matrix, x + row * matrix.K, y + row * matrix.N, panel);
        });
    });
}

#endif

}  // namespace

void multiply_quantized(const Matrix &matrix, const float *x, float *y, int64_t M) {
#ifndef __AVX512VNNI__
    if (matrix.kind == Q8) return multiply_bytes(matrix, x, y, M);
#endif
    static thread_local std::vector<Input> inputs;
    const int64_t groups = matrix.K / GROUP;
    if (static_cast<int64_t>(inputs.size()) < M * groups) inputs.resize(M * groups);
    Input *rounded = inputs.data();
    share_rows(M, [&](int64_t row) {
        for (int64_t n = row * groups; n < (row + 1) * groups; n++) round_group(x + n * GROUP, rounded[n]);
    });
    if (matrix.kind == Q4)
        multiply_groups<Group4>(matrix, rounded, y, M);
#ifdef __AVX512VNNI__
    else
        multiply_groups<Group8>(matrix, rounded, y, M);
#endif
}
