// Norms, gates, rotation and the cache write, row by row, in float32 inside. Knows nothing of torch.
#pragma once

#include <cmath>

#include "crew.h"
#include "vector.h"

template <typename T>
float sum_of_squares(const T *x, int64_t N) {
    v16 acc = splat(0.0f);
    int64_t n = 0;
    for (; n + LANES <= N; n += LANES) {
        v16 value = load(x + n);
        acc += value * value;
    }
    float sum = sum_lanes(acc);
    for (; n < N; n++) sum += to_float(x[n]) * to_float(x[n]);
    return sum;
}

template <typename T, typename W, typename Out>
void norm_row(const T *x, const W *weight, Out *out, int64_t N, float eps) {
    const float scale = 1.0f / std::sqrt(sum_of_squares(x, N) / static_cast<float>(N) + eps);
    int64_t n = 0;
    for (; n + LANES <= N; n += LANES) store(out + n, load(x + n) * splat(scale) * load(weight + n));
    for (; n < N; n++) from_float(out + n, to_float(x[n]) * scale * to_float(weight[n]));
}

template <typename T>
void add_row(const T *x, T *residual, int64_t N) {
    int64_t n = 0;
    for (; n + LANES <= N; n += LANES) store(residual + n, load(residual + n) + load(x + n));
    for (; n < N; n++) from_float(residual + n, to_float(residual[n]) + to_float(x[n]));
}

// `x` may be null: then the residual is only normalised.
template <typename T>
void add_rms_norm(const T *x, T *residual, const T *weight, T *out, int64_t M, int64_t N, float eps) {
    share_rows(M, [&](int64_t row) {
        if (x) add_row(x + row * N, residual + row * N, N);
        norm_row(residual + row * N, weight, out + row * N, N, eps);
    });
}

template <typename T>
void silu_mul(const T *gate_up, T *out, int64_t M, int64_t N) {
    share_rows(M, [&](int64_t row) {
        const T *gate = gate_up + row * 2 * N, *up = gate + N;
        T *target = out + row * N;
        int64_t n = 0;
        for (; n + LANES <= N; n += LANES) {
            v16 g = load(gate + n);
            store(target + n, g / (splat(1.0f) + exp_lanes(-g)) * load(up + n));
        }
        for (; n < N; n++) {
            v16 g = splat(to_float(gate[n]));
            from_float(target + n, (g / (splat(1.0f) + exp_lanes(-g)))[0] * to_float(up[n]));
        }
    });
}

constexpr int64_t MAX_HEAD_DIM = 512;

// cos_sin [D]: D/2 cosines, then as many sines. `norm` may be null.
template <typename T, typename Out>
void rotate_head(const T *x, const T *norm, float eps, const float *cos_sin, Out *out, int64_t D) {
    float wide[MAX_HEAD_DIM];
    if (norm)
        norm_row(x, norm, wide, D, eps);
    else
        for (int64_t d = 0; d < D; d++) wide[d] = to_float(x[d]);
    const int64_t half = D / 2;
    const float *cosines = cos_sin, *sines = cos_sin + half;
    int64_t d = 0;
    for (; d + LANES <= half; d += LANES) {
        const v16 low = load(wide + d), high = load(wide + d + half);
        const v16 cosine = load(cosines + d), sine = load(sines + d);
        store(out + d, low * cosine - high * sine);
        store(out + d + half, high * cosine + low * sine);
    }
    for (; d < half; d++) {
        from_float(out + d, wide[d] * cosines[d] - wide[d + half] * sines[d]);
        from_float(out + d + half, wide[d + half] * cosines[d] + wide[d] * sines[d]);
    }
}

template <typename T, typename Out>
void copy_head(const T *x, Out *out, int64_t D) {
    int64_t d = 0;
    for (; d + LANES <= D; d += LANES) store(out + d, load(x + d));
    for (; d < D; d++) from_float(out + d, to_float(x[d]));
}

struct RopeShape {
    int64_t num_tokens, num_heads, num_kv_heads, head_dim, block_size, block_stride, head_stride;
};

template <typename T, typename Cache>
void rope_and_cache(const T *qkv, const float *cos_sin, const int64_t *positions, const int64_t *slots,
                    const T *q_norm, const T *k_norm, float eps, T *query, Cache *k_cache, Cache *v_cache,
                    const RopeShape &shape) {
    const int64_t D = shape.head_dim, H = shape.num_heads, KV = shape.num_kv_heads;
    share_rows(shape.num_tokens, [&](int64_t t) {
        const T *q = qkv + t * (H + 2 * KV) * D, *k = q + H * D, *v = k + KV * D;
        const float *angles = cos_sin + positions[t] * D;
        const int64_t place = slots[t] / shape.block_size * shape.block_stride + slots[t] % shape.block_size * D;
        for (int64_t h = 0; h < H; h++)
            rotate_head(q + h * D, q_norm, eps, angles, query + (t * H + h) * D, D);
        for (int64_t h = 0; h < KV; h++) {
            rotate_head(k + h * D, k_norm, eps, angles, k_cache + place + h * shape.head_stride, D);
            copy_head(v + h * D, v_cache + place + h * shape.head_stride, D);
        }
    });
}
