// The operations of elementwise.h as functions of their own.

#include "elementwise.h"


#define EXPORT(T, suffix)                                                                                             \
    extern "C" void add_rms_norm_##suffix(const T *x, T *residual, const T *weight, T *out, int64_t M, int64_t N,     \
                                          float eps) {                                                                \
        add_rms_norm(x, residual, weight, out, M, N, eps);                                                            \
    }                                                                                                                 \
    extern "C" void silu_mul_##suffix(const T *gate_up, T *out, int64_t M, int64_t N) { silu_mul(gate_up, out, M, N); } \
    extern "C" void rope_and_cache_##suffix(const T *qkv, const float *cos_sin, const int64_t *positions,             \
                                            const int64_t *slots, const T *q_norm, const T *k_norm, float eps,        \
                                            T *query, T *k_cache, T *v_cache, const RopeShape *shape) {               \
        rope_and_cache(qkv, cos_sin, positions, slots, q_norm, k_norm, eps, query, k_cache, v_cache, *shape);         \
    }

EXPORT(float, f32)
EXPORT(bfloat, bf16)
