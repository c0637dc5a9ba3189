// float32 and bfloat16 weights, and the choice by kind: see matrix.h.

#include <algorithm>
#include <vector>

#include "crew.h"
#include "matrix.h"
#include "panel.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX512F__
constexpr int ROWS_OF_ONE = 12, ROWS_OF_TWO = 10;  // sums of WIDE panels beside one register of weights or two, of 32
constexpr int NARROW_ROWS = 6;    // up to so many rows, NARROW panels at once: more streams from memory
constexpr int WIDE = 2, NARROW = 4;
#else
constexpr int ROWS_OF_ONE = 6, ROWS_OF_TWO = 5;  // of 16
constexpr int NARROW_ROWS = 1;
constexpr int WIDE = 1, NARROW = 4;
#endif
constexpr int64_t AHEAD = 64;            // lines to ask for ahead of a stream from memory
constexpr int64_t ROWS_BYTES = 1 << 20;  // rows of x worked on together stay in the second-level cache

// How weights of one kind are read: a *unit* is what lies together for one or two k of a panel. `Input` is x as the
// unit's product takes it.
struct Float32 {
    static constexpr int MAX_ROWS = ROWS_OF_ONE;
    using Input = float;
    using Weight = float;
    static constexpr int64_t DEPTH = 1;  // k of a unit
    struct Unit {
        v16 weights;
    };
    INLINE Unit read(const float *at) { return {load(at)}; }
    INLINE v16 add(v16 acc, const Unit &unit, const float *x) { return acc + splat(*x) * unit.weights; }
};

#ifdef __AVX512BF16__

struct Bfloat16 {
    static constexpr int MAX_ROWS = ROWS_OF_ONE;
    using Input = uint32_t;  // a pair of x in bf16
    using Weight = bfloat;
    static constexpr int64_t DEPTH = 2;
    struct Unit {
        __m512bh weights;
    };
    INLINE Unit read(const bfloat *at) { return {(__m512bh)_mm512_loadu_si512(at)}; }
    INLINE v16 add(v16 acc, const Unit &unit, const uint32_t *x) {
        return (v16)_mm512_dpbf16_ps((__m512)acc, unit.weights, (__m512bh)_mm512_set1_epi32(*x));
    }
};

#else

struct Pair {
    float first, second;
};

struct Bfloat16 {
    static constexpr int MAX_ROWS = ROWS_OF_TWO;
    using Input = Pair;  // x stays as it is: nothing is lost to rounding
    using Weight = bfloat;
    static constexpr int64_t DEPTH = 2;
    struct Unit {
        v16 first, second;
    };
    INLINE Unit read(const bfloat *at) {
        const i16 pairs = bits(load(reinterpret_cast<const float *>(at)));
        return {floats(pairs << 16), floats(pairs & static_cast<int32_t>(0xffff0000))};
    }
    INLINE v16 add(v16 acc, const Unit &unit, const Pair *x) {
        acc += splat(x->first) * unit.first;
        return acc + splat(x->second) * unit.second;
    }
};

#endif

template <typename Kind>
struct Product {
    const typename Kind::Input *x;        // [M, depth]
    const typename Kind::Weight *packed;  // [N/16][depth] units of 16 * DEPTH weights
    const float *bias;                    // [N] or null
    float *y;                             // [M, N]
    int64_t depth, N;
};

// Asks for the weights that lie `ahead` of those that it works on; 0 asks for none.
template <typename Kind, int ROWS, int PANELS>
APART void tile(const Product<Kind> &p, int64_t row, int64_t panel, int64_t ahead) {
    constexpr int64_t UNIT = LANES * Kind::DEPTH;
    const auto *x = p.x + row * p.depth;
    const int64_t panel_size = p.depth * UNIT;
    const auto *w = p.packed + panel * panel_size;
    v16 acc[ROWS][PANELS];
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < PANELS; j++) acc[i][j] = splat(0.0f);
    for (int64_t k = 0; k < p.depth; k++) {
        typename Kind::Unit units[PANELS];
        for (int j = 0; j < PANELS; j++) {
            units[j] = Kind::read(w + j * panel_size + k * UNIT);
            if (ahead) __builtin_prefetch(w + j * panel_size + k * UNIT + ahead);
        }
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < PANELS; j++) acc[i][j] = Kind::add(acc[i][j], units[j], x + i * p.depth + k);
    }
    for (int j = 0; j < PANELS; j++) {
        const int64_t column = (panel + j) * LANES;
        const int64_t width = std::min<int64_t>(LANES, p.N - column);
        for (int i = 0; i < ROWS; i++)
            write(p.y + (row + i) * p.N + column, acc[i][j], p.bias ? p.bias + column : nullptr, width);
    }
}

template <typename Kind, int ROWS, int PANELS>
void rows_by_panels(const Product<Kind> &p, int64_t first, int64_t end, int64_t panel, int64_t num_panels) {
    if (num_panels != PANELS) {
        for (int64_t j = 0; j < num_panels; j++) rows_by_panels<Kind, ROWS, 1>(p, first, end, panel + j, 1);
        return;
    }
    constexpr int64_t UNIT = LANES * Kind::DEPTH;
    by_rows<ROWS>(first, end, [&](auto n, int64_t row) {
        const bool is_first = row == first, is_last = row + n == end;  // the last rows fetch the next panels meanwhile
        tile<Kind, n, PANELS>(p, row, panel, is_first ? AHEAD * UNIT : is_last ? PANELS * p.depth * UNIT : 0);
    });
}

template <typename Kind, int ROWS, int PANELS>
void by_panels(const Product<Kind> &p, int64_t M) {
    const int64_t num_panels = (p.N + LANES - 1) / LANES;
    const int64_t num_groups = (num_panels + PANELS - 1) / PANELS;
    const int64_t row_bytes = p.depth * static_cast<int64_t>(sizeof(typename Kind::Input));
    const int64_t rows = std::max<int64_t>(ROWS, ROWS_BYTES / row_bytes / ROWS * ROWS);
    for (int64_t first = 0; first < M; first += rows) {
        const int64_t end = std::min(M, first + rows);
        share(num_groups, [&](int64_t group) {
            const int64_t panel = group * PANELS;
            const int64_t count = std::min<int64_t>(PANELS, num_panels - panel);
            rows_by_panels<Kind, ROWS, PANELS>(p, first, end, panel, count);
        });
    }
}

template <typename Kind>
void multiply_kind(const Matrix &matrix, const typename Kind::Input *x, float *y, int64_t M) {
    const auto *packed = static_cast<const typename Kind::Weight *>(matrix.packed);
    const Product<Kind> product{x, packed, matrix.bias, y, matrix.K / Kind::DEPTH, matrix.N};
    if (M <= NARROW_ROWS)
        by_panels<Kind, NARROW_ROWS, NARROW>(product, M);
    else
        by_panels<Kind, Kind::MAX_ROWS, WIDE>(product, M);
}

#ifdef __AVX512BF16__

void multiply_bf16(const Matrix &matrix, const float *x, float *y, int64_t M) {
    static thread_local std::vector<uint32_t> pairs;
    pairs.resize(M * matrix.K / 2);
    bfloat *narrow = reinterpret_cast<bfloat *>(pairs.data());
    const int64_t size = M * matrix.K;
    int64_t n = 0;
    for (; n + LANES <= size; n += LANES) store(narrow + n, load(x + n));
    for (; n < size; n++) from_float(narrow + n, x[n]);
    multiply_kind<Bfloat16>(matrix, pairs.data(), y, M);
}

#else

void multiply_bf16(const Matrix &matrix, const float *x, float *y, int64_t M) {
    multiply_kind<Bfloat16>(matrix, reinterpret_cast<const Pair *>(x), y, M);
}

#endif

}  // namespace

void multiply(const Matrix &matrix, const float *x, float *y, int64_t M) {
    if (matrix.kind == F32)
        multiply_kind<Float32>(matrix, x, y, M);
    else if (matrix.kind == BF16)
        multiply_bf16(matrix, x, y, M);
    else
        multiply_quantized(matrix, x, y, M);
}

void read_row(const Matrix &matrix, int64_t row, float *out) {
    const int64_t at = row / LANES * matrix.K * LANES, lane = row % LANES;
    if (matrix.kind == Q4 || matrix.kind == Q8) return read_quantized_row(matrix, row, out);
    if (matrix.kind == F32) {
        const float *packed = static_cast<const float *>(matrix.packed) + at;
        for (int64_t k = 0; k < matrix.K; k++) out[k] = packed[k * LANES + lane];
    } else {
        const bfloat *packed = static_cast<const bfloat *>(matrix.packed) + at;
        for (int64_t k = 0; k < matrix.K; k++) out[k] = to_float(packed[k / 2 * 2 * LANES + lane * 2 + k % 2]);
    }
}

// weight [N, K] -> packed [ceil(N/16)][K][16], zeros past N.
extern "C" void pack_f32(const float *weight, float *packed, int64_t N, int64_t K) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < N; row += LANES) {
        float *panel = packed + row * K;
        const int64_t rows = std::min<int64_t>(LANES, N - row);
        for (int64_t k = 0; k < K; k++)
            for (int64_t i = 0; i < LANES; i++) panel[k * LANES + i] = i < rows ? weight[(row + i) * K + k] : 0.0f;
    }
}

// weight [N, K], K even -> packed [ceil(N/16)][K/2][16][2], zeros past N.
extern "C" void pack_bf16(const bfloat *weight, bfloat *packed, int64_t N, int64_t K) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < N; row += LANES) {
        bfloat *panel = packed + row * K;
        const int64_t rows = std::min<int64_t>(LANES, N - row);
        for (int64_t k = 0; k < K; k++)
            for (int64_t i = 0; i < LANES; i++)
                panel[k / 2 * 2 * LANES + i * 2 + k % 2] = i < rows ? weight[(row + i) * K + k] : bfloat{0};
    }
}

extern "C" void read_rows(const Matrix *matrix, const int64_t *rows, float *out, int64_t T) {
    for (int64_t t = 0; t < T; t++) read_row(*matrix, rows[t], out + t * matrix->K);
}

extern "C" void linear(const Matrix *matrix, const float *x, float *y, int64_t M) { multiply(*matrix, x, y, M); }
