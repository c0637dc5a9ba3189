// Causal attention over a block-major paged cache. Knows nothing of torch.
//
// One work item is (sequence, KV head, some query rows). It visits its keys in tiles of KEY_TILE counted from
// position 0, whatever the block size, and each (row, head) keeps its own running softmax in one fixed order: a
// row's result is the same to the bit in any batch and any chunking of its prompt.
//
//     keys  0........31 32.......63 64...   for each tile: K transposed to [D][32], V as rows,
//     row r [-- seen by r --------)          scores ─► peak, weights ─► acc = acc · decay + weights · V

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "vector.h"


constexpr int KEY_TILE = 32;
constexpr int QUERY_VECTORS = 64;  // (row, head) pairs of one work item
constexpr int ATTENTION_HEAD_DIM = 512;

struct AttentionShape {
    int64_t num_seqs, num_heads, num_kv_heads, head_dim, block_size, max_blocks, block_stride, head_stride;
    float scale;
};

struct AttentionItem {
    int64_t seq, kv_head, first_row, end_row;
};

struct AttentionScratch {
    alignas(64) float keys[ATTENTION_HEAD_DIM * KEY_TILE];       // [D][KEY_TILE]
    alignas(64) float values[KEY_TILE * ATTENTION_HEAD_DIM];     // [KEY_TILE][D]
    alignas(64) float queries[QUERY_VECTORS * ATTENTION_HEAD_DIM];
    alignas(64) float acc[QUERY_VECTORS * ATTENTION_HEAD_DIM];
    alignas(64) float weights[QUERY_VECTORS * KEY_TILE];
    float peaks[QUERY_VECTORS];
    v16 totals[QUERY_VECTORS];
    int64_t last_key[QUERY_VECTORS];  // the last position that each may see
    int num_vectors;
};

// Fills keys and values from `start` on; lanes past `count` repeat the last key and are masked later.
template <typename T>
void load_tile(AttentionScratch &s, const T *k, const T *v, const int32_t *table, int64_t start, int count, const AttentionShape &shape) {
    const int64_t D = shape.head_dim;
    int64_t offsets[KEY_TILE];
    for (int j = 0; j < KEY_TILE; j++) {
        const int64_t position = start + std::min(j, count - 1);
        offsets[j] = table[position / shape.block_size] * shape.block_stride + position % shape.block_size * D;
    }
    for (int64_t d = 0; d < D; d += LANES) {
        for (int half = 0; half < KEY_TILE; half += LANES) {
            v16 rows[LANES];
            for (int j = 0; j < LANES; j++) rows[j] = load(k + offsets[half + j] + d);
            transpose16(rows);
            for (int lane = 0; lane < LANES; lane++) store(s.keys + (d + lane) * KEY_TILE + half, rows[lane]);
        }
        for (int j = 0; j < count; j++) store(s.values + j * D + d, load(v + offsets[j] + d));
    }
}

template <int N>
void score(AttentionScratch &s, int first, int64_t D) {
    v16 acc[N][2] = {};
    for (int64_t d = 0; d < D; d++) {
        const v16 low = load(s.keys + d * KEY_TILE), high = load(s.keys + d * KEY_TILE + LANES);
        for (int i = 0; i < N; i++) {
            const v16 q = splat(s.queries[(first + i) * D + d]);
            acc[i][0] += q * low;
            acc[i][1] += q * high;
        }
    }
    for (int i = 0; i < N; i++) {
        store(s.weights + (first + i) * KEY_TILE, acc[i][0]);
        store(s.weights + (first + i) * KEY_TILE + LANES, acc[i][1]);
    }
}

// acc[first..first+N][d..d+16C] = acc · decay + weights · values
template <int N, int C>
void accumulate(AttentionScratch &s, int first, int64_t d, int count, int64_t D, const float *decay) {
    v16 acc[N][C];
    for (int i = 0; i < N; i++)
        for (int c = 0; c < C; c++) acc[i][c] = load(s.acc + (first + i) * D + d + c * LANES) * splat(decay[first + i]);
    for (int j = 0; j < count; j++) {
        v16 value[C];
        for (int c = 0; c < C; c++) value[c] = load(s.values + j * D + d + c * LANES);
        for (int i = 0; i < N; i++) {
            const v16 weight = splat(s.weights[(first + i) * KEY_TILE + j]);
            for (int c = 0; c < C; c++) acc[i][c] += weight * value[c];
        }
    }
    for (int i = 0; i < N; i++)
        for (int c = 0; c < C; c++) store(s.acc + (first + i) * D + d + c * LANES, acc[i][c]);
}

template <int N>
void accumulate_rows(AttentionScratch &s, int first, int count, int64_t D, const float *decay) {
    int64_t d = 0;
    for (; d + 4 * LANES <= D; d += 4 * LANES) accumulate<N, 4>(s, first, d, count, D, decay);
    for (; d < D; d += LANES) accumulate<N, 1>(s, first, d, count, D, decay);
}

// Turns scores into weights; returns by how much what was gathered so far shrinks.
inline float soften(AttentionScratch &s, int i, int64_t start) {
    const i16 lane = iota();
    const int32_t seen = static_cast<int32_t>(std::clamp<int64_t>(s.last_key[i] - start + 1, 0, KEY_TILE));
    const v16 hidden = splat(-INFINITY);
    v16 low = select(lane < seen, load(s.weights + i * KEY_TILE), hidden);
    v16 high = select(lane + LANES < seen, load(s.weights + i * KEY_TILE + LANES), hidden);
    const float peak = std::max(s.peaks[i], max_lanes(maximum(low, high)));
    low = exp_lanes(low - splat(peak));
    high = exp_lanes(high - splat(peak));
    const float decay = exp_lanes(splat(s.peaks[i] - peak))[0];
    s.totals[i] = s.totals[i] * splat(decay) + (low + high);
    s.peaks[i] = peak;
    store(s.weights + i * KEY_TILE, low);
    store(s.weights + i * KEY_TILE + LANES, high);
    return decay;
}

inline void attend_tile(AttentionScratch &s, int64_t start, int count, int64_t D) {
    int i = 0;
    for (; i + 8 <= s.num_vectors; i += 8) score<8>(s, i, D);
    for (; i + 3 <= s.num_vectors; i += 3) score<3>(s, i, D);
    for (; i < s.num_vectors; i++) score<1>(s, i, D);
    float decay[QUERY_VECTORS];
    for (i = 0; i < s.num_vectors; i++) decay[i] = soften(s, i, start);
    for (i = 0; i + 4 <= s.num_vectors; i += 4) accumulate_rows<4>(s, i, count, D, decay);
    for (; i + 3 <= s.num_vectors; i += 3) accumulate_rows<3>(s, i, count, D, decay);
    for (; i < s.num_vectors; i++) accumulate_rows<1>(s, i, count, D, decay);
}

template <typename T>
void begin(AttentionScratch &s, const AttentionItem &item, const T *query, int64_t first_position, const AttentionShape &shape) {
    const int64_t D = shape.head_dim, group = shape.num_heads / shape.num_kv_heads;
    s.num_vectors = static_cast<int>((item.end_row - item.first_row) * group);
    for (int i = 0; i < s.num_vectors; i++) {
        const T *q = query + ((item.first_row + i / group) * shape.num_heads + item.kv_head * group + i % group) * D;
        for (int64_t d = 0; d < D; d += LANES) store(s.queries + i * D + d, load(q + d) * splat(shape.scale));
        s.last_key[i] = first_position + i / group;
        s.peaks[i] = -INFINITY;
        s.totals[i] = splat(0.0f);
    }
    std::fill(s.acc, s.acc + s.num_vectors * D, 0.0f);
}

template <typename T>
void finish(AttentionScratch &s, const AttentionItem &item, T *output, const AttentionShape &shape) {
    const int64_t D = shape.head_dim, group = shape.num_heads / shape.num_kv_heads;
    for (int i = 0; i < s.num_vectors; i++) {
        T *out = output + ((item.first_row + i / group) * shape.num_heads + item.kv_head * group + i % group) * D;
        const v16 total = splat(sum_lanes(s.totals[i]));
        for (int64_t d = 0; d < D; d += LANES) store(out + d, load(s.acc + i * D + d) / total);
    }
}

inline std::vector<AttentionItem> list_items(const int32_t *query_starts, const AttentionShape &shape) {
    const int64_t rows = std::max<int64_t>(1, QUERY_VECTORS / (shape.num_heads / shape.num_kv_heads));
    std::vector<AttentionItem> items;
    for (int64_t seq = 0; seq < shape.num_seqs; seq++)
        for (int64_t row = query_starts[seq]; row < query_starts[seq + 1]; row += rows)
            for (int64_t head = 0; head < shape.num_kv_heads; head++)
                items.push_back({seq, head, row, std::min<int64_t>(row + rows, query_starts[seq + 1])});
    return items;
}

template <typename T, typename Cache>
void attention(const T *query, const Cache *k_cache, const Cache *v_cache, const int32_t *query_starts,
               const int32_t *context_lens, const int32_t *block_tables, T *output, const AttentionShape &shape) {
    const std::vector<AttentionItem> items = list_items(query_starts, shape);
#pragma omp parallel if (items.size() > 1)
    {
        static thread_local AttentionScratch scratch;
        AttentionScratch &s = scratch;
#pragma omp for schedule(dynamic, 1)
        for (size_t n = 0; n < items.size(); n++) {
            const AttentionItem &item = items[n];
            const int64_t context_start = context_lens[item.seq] - query_starts[item.seq + 1];
            const int64_t end = context_start + item.end_row;  // one past the last key that the item may see
            begin(s, item, query, context_start + item.first_row, shape);
            for (int64_t start = 0; start < end; start += KEY_TILE) {
                const int count = static_cast<int>(std::min<int64_t>(KEY_TILE, end - start));
                const int64_t head = item.kv_head * shape.head_stride;
                load_tile(s, k_cache + head, v_cache + head, block_tables + item.seq * shape.max_blocks, start, count,
                          shape);
                attend_tile(s, start, count, shape.head_dim);
            }
            finish(s, item, output, shape);
        }
    }
}
