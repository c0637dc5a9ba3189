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

#include "matrix.h"
#include "vector.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int GROUP = 32;          // k of a group
constexpr int QUADS = GROUP / 4;   // integer products take four k at a time
constexpr int64_t AHEAD_BYTES = 2048;

constexpr int STEP = 254;  // of high, in steps of low

struct Input {  // one group of one row of x
    float scale, sum;  // sum of x itself
    int32_t total;     // sum of 254 · high + low
    int8_t high[GROUP], low[GROUP];
};

// A group of a panel. Q4: two quads share the bytes, the earlier one in the low halves.
struct Group4 {
    uint16_t scales[LANES], offsets[LANES];  // float16
    uint8_t pairs[QUADS / 2][LANES][4];
};

struct Group8 {
    uint16_t scales[LANES];
    int8_t quads[QUADS][LANES][4];
};

INLINE float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, exponent = half >> 10 & 31, rest = half & 1023;
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * static_cast<float>(rest) * 0x1p-24f;
    const uint32_t wide = exponent == 31 ? 255 : exponent + 112;
    const uint32_t pattern = sign | wide << 23 | rest << 13;
    float value;
    memcpy(&value, &pattern, sizeof value);
    return value;
}

INLINE uint16_t minus_eight_times(uint16_t half) {
    uint16_t size = half & 0x7fff;
    for (int i = 0; i < 3; i++) size += size < 1 << 10 ? size : 1 << 10;  // doubled: below 2^10 it has no exponent
    return static_cast<uint16_t>(size | (~half & 0x8000));
}

INLINE v16 load_halves(const uint16_t *p) {
    float wide[LANES];
#if defined(__F16C__)
    _mm256_storeu_ps(wide, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
    _mm256_storeu_ps(wide + 8, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p + 8))));
#else
    for (int i = 0; i < LANES; i++) wide[i] = half_to_float(p[i]);
#endif
    return load(wide);
}

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

INLINE Units unpack(const Group8 &group) {
    Units units;
    for (int q = 0; q < QUADS; q++)
        for (int half = 0; half < 2; half++) units.quads[q][half] = bytes_at(group.quads[q][8 * half]);
    return units;
}

INLINE __m256i half_sums(const Units &units, const int8_t *values, int half, bool is_signed) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum = _mm256_setzero_si256();
    if (is_signed) {  // |w| <= 128 by |x| <= 127: two of them fit sixteen bits
        for (int q = 0; q < QUADS; q++) {
            const __m256i w = units.quads[q][half];
            const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(quad_of(values, q), w));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
        }
        return sum;
    }
    for (int q = 0; q < QUADS; q++)  // w <= 15: all sixteen of them do
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(units.quads[q][half], quad_of(values, q)));
    return _mm256_madd_epi16(sum, ones);
}

INLINE v8 both_sums(const Units &units, const Input &x, int half, bool is_signed) {
    const __m256i high = half_sums(units, x.high, half, is_signed), low = half_sums(units, x.low, half, is_signed);
    return (v8)_mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_mullo_epi32(high, _mm256_set1_epi32(STEP)), low));
}

template <bool IS_SIGNED>
INLINE v16 sums(const Units &units, const Input &x) {
    return join(both_sums(units, x, 0, IS_SIGNED), both_sums(units, x, 1, IS_SIGNED));
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

INLINE Units unpack(const Group8 &group) {
    Units units;
    for (int q = 0; q < QUADS; q++)
        for (int n = 0; n < LANES; n++)
            for (int i = 0; i < 4; i++) units.quads[q][n][i] = group.quads[q][n][i];
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

INLINE void gather(v16 &acc, const Group8 &group, const Units &units, v16 scales, v16, const Input &x) {
    acc += sums<true>(units, x) * (scales * splat(x.scale));
}

INLINE v16 offsets_of(const Group4 &group) { return load_halves(group.offsets); }
INLINE v16 offsets_of(const Group8 &) { return splat(0.0f); }

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
            float all[LANES];
            store(all, p.bias && width == LANES ? acc[i][j] + load(p.bias + column) : acc[i][j]);
            float *out = p.y + (row + i) * p.N + column;
            if (p.bias && width < LANES)
                for (int64_t n = 0; n < width; n++) all[n] += p.bias[column + n];
            memcpy(out, all, width * sizeof(float));
        }
}

template <typename Group, int ROWS, int PANELS, bool FIRST>
void tile_of(const Product<Group> &p, int64_t rows, int64_t row, int64_t panel) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return tile_of<Group, ROWS - 1, PANELS, FIRST>(p, rows, row, panel);
    }
    tile<Group, ROWS, PANELS, FIRST>(p, row, panel);
}

constexpr int MAX_ROWS = 4, STREAMS = 4;

template <typename Group>
void panels_from(const Product<Group> &p, int64_t M, int64_t panel, int64_t count) {
    if (M == 1 && count == STREAMS) return tile<Group, 1, STREAMS, true>(p, 0, panel);
    for (int64_t j = panel; j < panel + count; j++) {
        tile_of<Group, MAX_ROWS, 1, true>(p, std::min<int64_t>(MAX_ROWS, M), 0, j);
        for (int64_t row = MAX_ROWS; row < M; row += MAX_ROWS)
            tile_of<Group, MAX_ROWS, 1, false>(p, std::min<int64_t>(MAX_ROWS, M - row), row, j);
    }
}

constexpr int64_t BLOCK_ROWS = 256;  // rows of x worked on together stay in the cache

template <typename Group>
void multiply_groups(const Matrix &matrix, const Input *x, float *y, int64_t M) {
    const int64_t groups = matrix.K / GROUP, num_panels = (matrix.N + LANES - 1) / LANES;
    const int64_t steps = (num_panels + STREAMS - 1) / STREAMS;
    for (int64_t first = 0; first < M; first += BLOCK_ROWS) {
        const Product<Group> p{x + first * groups, static_cast<const Group *>(matrix.packed), matrix.bias,
                               y + first * matrix.N, groups, matrix.N};
        const int64_t rows = std::min<int64_t>(BLOCK_ROWS, M - first);
#pragma omp parallel for schedule(static)
        for (int64_t step = 0; step < steps; step++) {
            const int64_t panel = step * STREAMS;
            panels_from(p, rows, panel, std::min<int64_t>(STREAMS, num_panels - panel));
        }
    }
}

}  // namespace

void multiply_quantized(const Matrix &matrix, const float *x, float *y, int64_t M) {
    static thread_local std::vector<Input> inputs;
    const int64_t groups = matrix.K / GROUP;
    if (static_cast<int64_t>(inputs.size()) < M * groups) inputs.resize(M * groups);
    Input *rounded = inputs.data();
#pragma omp parallel for schedule(static) if (M > 1)
    for (int64_t n = 0; n < M * groups; n++) round_group(x + n * GROUP, rounded[n]);
    if (matrix.kind == Q4)
        multiply_groups<Group4>(matrix, rounded, y, M);
    else
        multiply_groups<Group8>(matrix, rounded, y, M);
}

void read_quantized_row(const Matrix &matrix, int64_t row, float *out) {
    const int64_t groups = matrix.K / GROUP, lane = row % LANES;
    for (int64_t g = 0; g < groups; g++)
        for (int k = 0; k < GROUP; k++) {
            const int64_t at = row / LANES * groups + g;
            if (matrix.kind == Q4) {
                const Group4 &group = static_cast<const Group4 *>(matrix.packed)[at];
                const int q = group.pairs[k / 8][lane][k % 4] >> (k / 4 % 2 * 4) & 15;
                out[g * GROUP + k] = half_to_float(group.scales[lane]) * q + half_to_float(group.offsets[lane]);
            } else {
                const Group8 &group = static_cast<const Group8 *>(matrix.packed)[at];
                out[g * GROUP + k] = half_to_float(group.scales[lane]) * group.quads[k / 4][lane][k % 4];
            }
        }
}

// GGUF's blocks of 32: float16 d, for Q4_1 float16 m, then the values; of four bits, the first sixteen in the low
// halves of the bytes and the others in the high ones. Q4_0 means d (q - 8).
extern "C" void pack_q4(const uint8_t *blocks, void *packed, int64_t N, int64_t K, int64_t has_offset) {
    const int64_t groups = K / GROUP, block_bytes = 2 + 2 * has_offset + GROUP / 2;
    Group4 *panels = static_cast<Group4 *>(packed);
    memset(packed, 0, (N + LANES - 1) / LANES * groups * sizeof(Group4));
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < (N + LANES - 1) / LANES; panel++)
        for (int64_t row = panel * LANES; row < std::min<int64_t>(N, (panel + 1) * LANES); row++)
            for (int64_t g = 0; g < groups; g++) {
                const uint8_t *block = blocks + (row * groups + g) * block_bytes;
                Group4 &group = panels[panel * groups + g];
                const int64_t lane = row % LANES;
                memcpy(&group.scales[lane], block, 2);
                if (has_offset)
                    memcpy(&group.offsets[lane], block + 2, 2);
                else
                    group.offsets[lane] = minus_eight_times(group.scales[lane]);
                const uint8_t *values = block + block_bytes - GROUP / 2;
                for (int k = 0; k < GROUP; k++) {
                    const int q = k < 16 ? values[k] & 15 : values[k - 16] >> 4;
                    group.pairs[k / 8][lane][k % 4] |= static_cast<uint8_t>(q << (k / 4 % 2 * 4));
                }
            }
}

extern "C" void pack_q8(const uint8_t *blocks, void *packed, int64_t N, int64_t K) {
    const int64_t groups = K / GROUP;
    Group8 *panels = static_cast<Group8 *>(packed);
    memset(packed, 0, (N + LANES - 1) / LANES * groups * sizeof(Group8));
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < (N + LANES - 1) / LANES; panel++)
        for (int64_t row = panel * LANES; row < std::min<int64_t>(N, (panel + 1) * LANES); row++)
            for (int64_t g = 0; g < groups; g++) {
                const uint8_t *block = blocks + (row * groups + g) * (2 + GROUP);
                Group8 &group = panels[panel * groups + g];
                memcpy(&group.scales[row % LANES], block, 2);
                for (int k = 0; k < GROUP; k++) group.quads[k / 4][row % LANES][k % 4] = static_cast<int8_t>(block[2 + k]);
            }
}

extern "C" int64_t packed_group_bytes(int64_t kind) { return kind == Q4 ? sizeof(Group4) : sizeof(Group8); }
