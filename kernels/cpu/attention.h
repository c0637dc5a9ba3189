// Causal attention over a block-major paged cache. Knows nothing of torch.
//
// One work item is (sequence, KV head, some query rows). It visits its keys in tiles of KEY_TILE counted from
// position 0, whatever the block size, and each (row, head) keeps its own running softmax in one fixed order: a
// row's result is the same to the bit in any batch and any chunking of its prompt.
//
//     keys  0........31 32.......63 64...   for each tile: K transposed to [D][32], V as rows,
//     row r [-- seen by r --------)          scores ─► peak, weights ─► acc = acc · decay + weights · V
//
// An item of few rows (decode) reads V straight from the cache; for many (a chunk of a prompt) it is widened once.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "panel.h"


constexpr int KEY_TILE = 32;
constexpr int QUERY_VECTORS = 64;  // (row, head) pairs of one work item
constexpr int FEW_VECTORS = 4;     // up to so many, widening values first costs more than it saves
constexpr int ATTENTION_HEAD_DIM = 512;
constexpr int64_t LINE = 64;  // bytes

#ifdef __AVX512F__
constexpr int SCORE_ROWS = 12, VALUE_ROWS = 6, VALUE_WIDTH = 4;  // sums that 32 registers hold
#else
constexpr int SCORE_ROWS = 3, VALUE_ROWS = 3, VALUE_WIDTH = 2;  // 16 registers
#endif

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

// A tile's keys in the cache of one KV head.
template <typename T>
struct KeyTile {
    const T *k, *v;
    int64_t offsets[KEY_TILE];  // of each key's row; past `count` the last key's, masked later
    int count;

    KeyTile(const T *k, const T *v, const int32_t *table, int64_t start, int64_t end, const AttentionShape &shape)
        : k(k), v(v), count(static_cast<int>(std::min<int64_t>(KEY_TILE, end - start))) {
        int64_t block = start / shape.block_size, row = start % shape.block_size;
        for (int j = 0; j < count; j++) {
            offsets[j] = table[block] * shape.block_stride + row * shape.head_dim;
            if (++row == shape.block_size) row = 0, block++;
        }
        for (int j = count; j < KEY_TILE; j++) offsets[j] = offsets[count - 1];
    }

    // Rows of a cache lie in pieces all over the memory: nobody else foresees where the next ones are.
    void prefetch(int64_t head_dim) const {
        for (int j = 0; j < count; j++)
            for (int64_t d = 0; d < head_dim; d += LINE / static_cast<int64_t>(sizeof(T))) {
                __builtin_prefetch(k + offsets[j] + d);
                __builtin_prefetch(v + offsets[j] + d);
            }
    }
};

// How a lane of transposed keys becomes numbers: one float, or two in bfloat16.
template <typename T>
constexpr int IN_LANE = sizeof(float) / sizeof(T);

template <typename T>
INLINE lanes key_of(lanes raw, int which) {
    if constexpr (IN_LANE<T> == 1) return raw;
    const lane_bits pair = reinterpret_cast<lane_bits>(raw);
    return reinterpret_cast<lanes>(which == 0 ? pair << 16 : pair & 0xffff0000u);
}

// Calls body(d, keys) for every d, where `keys` holds the value at d of each of REGISTER keys from `first` on.
template <typename T, typename Body>
INLINE void each_dimension(const KeyTile<T> &tile, int first, int64_t D, Body body) {
    constexpr int WIDTH = REGISTER * IN_LANE<T>;  // what one register reads of a key
    for (int64_t d = 0; d < D; d += WIDTH) {
        const int64_t width = std::min<int64_t>(WIDTH, D - d);
        lanes rows[REGISTER];
        for (int j = 0; j < REGISTER; j++) {
            const T *at = tile.k + tile.offsets[first + j] + d;
            if (WIDTH <= LANES || width == WIDTH) {
                rows[j] = load_register(reinterpret_cast<const float *>(at));
            } else {
                float part[REGISTER] = {};
                memcpy(part, at, width * sizeof(T));
                rows[j] = load_register(part);
            }
        }
        transpose(rows);
#pragma GCC unroll 16
        for (int lane = 0; lane < REGISTER; lane++) {
            if (WIDTH > LANES && lane * IN_LANE<T> >= width) break;
            for (int which = 0; which < IN_LANE<T>; which++)
                body(d + lane * IN_LANE<T> + which, key_of<T>(rows[lane], which));
        }
    }
}

template <typename T>
void widen_keys(AttentionScratch &s, const KeyTile<T> &tile, int64_t D) {
    for (int first = 0; first < KEY_TILE; first += REGISTER)
        each_dimension(tile, first, D, [&](int64_t d, lanes keys) {
            store_register(s.keys + d * KEY_TILE + first, keys);
        });
}

template <typename T>
void widen_values(AttentionScratch &s, const KeyTile<T> &tile, int64_t D) {
    for (int j = 0; j < tile.count; j++)
        for (int64_t d = 0; d < D; d += LANES) store(s.values + j * D + d, load(tile.v + tile.offsets[j] + d));
}

// Scores of vectors first..first+N from the widened tile.
template <int N>
void score(AttentionScratch &s, int64_t first, int64_t D) {
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

// acc[first..first+N][d..d+16C] = acc · decay + weights · values; value(j) points to the row of key j.
template <int N, int C, typename Value>
INLINE void accumulate(AttentionScratch &s, int64_t first, int64_t d, int count, int64_t D, const float *decay, Value value) {
    v16 acc[N][C];
    for (int i = 0; i < N; i++)
        for (int c = 0; c < C; c++) acc[i][c] = load(s.acc + (first + i) * D + d + c * LANES) * splat(decay[first + i]);
    for (int j = 0; j < count; j++) {
        const auto *row = value(j) + d;
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            const v16 part = load(row + c * LANES);
            for (int i = 0; i < N; i++) acc[i][c] += splat(s.weights[(first + i) * KEY_TILE + j]) * part;
            asm volatile("" ::: "memory");  // or all reads of this key go first, and push sums out of registers
        }
    }
    for (int i = 0; i < N; i++)
        for (int c = 0; c < C; c++) store(s.acc + (first + i) * D + d + c * LANES, acc[i][c]);
}

template <typename Value>
INLINE void accumulate_all(AttentionScratch &s, int count, int64_t D, const float *decay, Value value) {
    by_rows<VALUE_ROWS>(0, s.num_vectors, [&](auto n, int64_t first) {
        int64_t d = 0;
        for (; d + VALUE_WIDTH * LANES <= D; d += VALUE_WIDTH * LANES)
            accumulate<n, VALUE_WIDTH>(s, first, d, count, D, decay, value);
        for (; d < D; d += LANES) accumulate<n, 1>(s, first, d, count, D, decay, value);
    });
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

template <typename T>
void attend_tile(AttentionScratch &s, const KeyTile<T> &tile, int64_t start, int64_t D) {
    const bool is_few = s.num_vectors <= FEW_VECTORS;
    widen_keys(s, tile, D);
    if (!is_few) widen_values(s, tile, D);
    by_rows<SCORE_ROWS>(0, s.num_vectors, [&](auto n, int64_t first) { score<n>(s, first, D); });
    float decay[QUERY_VECTORS];
    for (int i = 0; i < s.num_vectors; i++) decay[i] = soften(s, i, start);
    if (is_few)
        accumulate_all(s, tile.count, D, decay, [&](int j) { return tile.v + tile.offsets[j]; });
    else
        accumulate_all(s, tile.count, D, decay, [&](int j) { return s.values + j * D; });
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
            const int64_t head = item.kv_head * shape.head_stride;
            const int32_t *table = block_tables + item.seq * shape.max_blocks;
            const auto tile_at = [&](int64_t start) {
                return KeyTile<Cache>(k_cache + head, v_cache + head, table, start, end, shape);
            };
            KeyTile<Cache> tile = tile_at(0);
            for (int64_t start = 0; start < end; start += KEY_TILE) {
                const int64_t next_start = start + KEY_TILE;
                const KeyTile<Cache> next = next_start < end ? tile_at(next_start) : tile;
                next.prefetch(shape.head_dim);
                attend_tile(s, tile, start, shape.head_dim);
                tile = next;
            }
            finish(s, item, output, shape);
        }
    }
}
