// float32 matrix product over weights packed once. Knows nothing of torch.
//
//     packed [N/16][K][16]      sixteen outputs' weights for one k lie together; N padded with zeros
//
// Every output is one chain of fused multiply-adds over k = 0, 1, ..., K-1 in one register lane, whatever the number
// of rows: a row's result is the same to the bit in any batch.

#include <algorithm>

#include "vector.h"

namespace {

#ifdef __AVX512F__
constexpr int MAX_ROWS = 12;      // times WIDE panels of accumulators, of 32 registers
constexpr int NARROW_ROWS = 6;    // up to so many rows, NARROW panels at once: more streams from memory
constexpr int WIDE = 2, NARROW = 4;
#else
constexpr int MAX_ROWS = 3;
constexpr int NARROW_ROWS = 1;
constexpr int WIDE = 2, NARROW = 4;
#endif
constexpr int64_t AHEAD = 64;            // lines to ask for ahead of a stream from memory
constexpr int64_t ROWS_BYTES = 1 << 20;  // rows of x worked on together stay in the second-level cache

struct Product {
    const float *x;       // [M, K]
    const float *packed;  // [N/16][K][16]
    const float *bias;    // [N] or null
    float *y;             // [M, N]
    int64_t K, N;
};

// FIRST: the first rows to read these weights ask for them ahead.
template <int ROWS, int PANELS, bool FIRST>
void tile(const Product &p, int64_t row, int64_t panel) {
    const float *x = p.x + row * p.K;
    const float *w = p.packed + panel * p.K * LANES;
    const int64_t panel_size = p.K * LANES;
    v16 acc[ROWS][PANELS] = {};
    for (int64_t k = 0; k < p.K; k++) {
        v16 weights[PANELS];
        for (int j = 0; j < PANELS; j++) {
            weights[j] = load(w + j * panel_size + k * LANES);
            if (FIRST) __builtin_prefetch(w + j * panel_size + (k + AHEAD) * LANES);
        }
        for (int i = 0; i < ROWS; i++) {
            v16 value = splat(x[i * p.K + k]);
            for (int j = 0; j < PANELS; j++) acc[i][j] += value * weights[j];
        }
    }
    for (int j = 0; j < PANELS; j++) {
        const int64_t column = (panel + j) * LANES;
        const int64_t width = std::min<int64_t>(LANES, p.N - column);
        for (int i = 0; i < ROWS; i++) {
            float *out = p.y + (row + i) * p.N + column;
            if (width == LANES) {
                store(out, p.bias ? acc[i][j] + load(p.bias + column) : acc[i][j]);
            } else {
                for (int64_t lane = 0; lane < width; lane++)
                    out[lane] = p.bias ? acc[i][j][lane] + p.bias[column + lane] : acc[i][j][lane];
            }
        }
    }
}

// `rows` is at most ROWS: finds the instance for exactly that many.
template <int ROWS, int PANELS, bool FIRST>
void tile_of(const Product &p, int64_t rows, int64_t row, int64_t panel) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return tile_of<ROWS - 1, PANELS, FIRST>(p, rows, row, panel);
    }
    tile<ROWS, PANELS, FIRST>(p, row, panel);
}

template <int ROWS, int PANELS>
void rows_by_panels(const Product &p, int64_t first, int64_t end, int64_t panel, int64_t num_panels) {
    if (num_panels != PANELS) {
        for (int64_t j = 0; j < num_panels; j++) rows_by_panels<ROWS, 1>(p, first, end, panel + j, 1);
        return;
    }
    tile_of<ROWS, PANELS, true>(p, std::min<int64_t>(ROWS, end - first), first, panel);
    for (int64_t row = first + ROWS; row < end; row += ROWS)
        tile_of<ROWS, PANELS, false>(p, std::min<int64_t>(ROWS, end - row), row, panel);
}

template <int ROWS, int PANELS>
void multiply(const Product &p, int64_t M) {
    const int64_t num_panels = (p.N + LANES - 1) / LANES;
    const int64_t num_groups = (num_panels + PANELS - 1) / PANELS;
    const int64_t rows = std::max<int64_t>(ROWS, ROWS_BYTES / (4 * p.K) / ROWS * ROWS);
    for (int64_t first = 0; first < M; first += rows) {
        const int64_t end = std::min(M, first + rows);
#pragma omp parallel for schedule(static)
        for (int64_t group = 0; group < num_groups; group++) {
            const int64_t panel = group * PANELS;
            rows_by_panels<ROWS, PANELS>(p, first, end, panel, std::min<int64_t>(PANELS, num_panels - panel));
        }
    }
}

}  // namespace

// weight [N, K] -> packed [ceil(N/16)][K][16], zeros past N.
extern "C" void pack_f32(const float *weight, float *packed, int64_t N, int64_t K) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < N; row += LANES) {
        float *panel = packed + row * K;
        const int64_t rows = std::min<int64_t>(LANES, N - row);
        for (int64_t k = 0; k < K; k += LANES) {
            const int64_t width = std::min<int64_t>(LANES, K - k);
            v16 lanes[LANES] = {};
            for (int64_t i = 0; i < rows; i++) memcpy(lanes + i, weight + (row + i) * K + k, width * sizeof(float));
            transpose16(lanes);
            for (int64_t i = 0; i < width; i++) store(panel + (k + i) * LANES, lanes[i]);
        }
    }
}

extern "C" void linear_f32(const float *x, const float *packed, const float *bias, float *y, int64_t M, int64_t K,
                           int64_t N) {
    const Product product{x, packed, bias, y, K, N};
    if (M <= NARROW_ROWS)
        multiply<NARROW_ROWS, NARROW>(product, M);
    else
        multiply<MAX_ROWS, WIDE>(product, M);
}
