// Sixteen floats at a time, in GCC's vector extensions: AVX-512 uses one register for one, AVX2 two.
// Knows nothing of kernels. All arithmetic here is elementwise or in one fixed order.
#pragma once

#include <cstdint>
#include <cstring>

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t u16 __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));
typedef float v16_unaligned __attribute__((vector_size(64), aligned(4)));
typedef uint16_t h16_unaligned __attribute__((vector_size(32), aligned(2)));

constexpr int LANES = 16;

struct bfloat {
    uint16_t bits;
};

static inline v16 splat(float x) {
    return v16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}

static inline v16 load(const float *p) { return *reinterpret_cast<const v16_unaligned *>(p); }

static inline v16 load(const bfloat *p) {
    h16 narrow = *reinterpret_cast<const h16_unaligned *>(p);
    return reinterpret_cast<v16>(__builtin_convertvector(narrow, u16) << 16);
}

static inline void store(float *p, v16 x) { *reinterpret_cast<v16_unaligned *>(p) = x; }

// Round to nearest even; NaN stays NaN.
static inline void store(bfloat *p, v16 x) {
    u16 bits = reinterpret_cast<u16>(x);
    u16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u16 is_nan = reinterpret_cast<u16>(x != x);
    rounded = (rounded & ~is_nan) | (is_nan & 0x7fc0);
    *reinterpret_cast<h16_unaligned *>(p) = __builtin_convertvector(rounded, h16);
}

static inline float to_float(float x) { return x; }

static inline float to_float(bfloat x) {
    uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline void from_float(float *p, float x) { *p = x; }

static inline void from_float(bfloat *p, float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    p->bits = x != x ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline v16 select(i16 mask, v16 a, v16 b) {
    return reinterpret_cast<v16>((mask & reinterpret_cast<i16>(a)) | (~mask & reinterpret_cast<i16>(b)));
}

static inline v16 maximum(v16 a, v16 b) { return select(a > b, a, b); }

static inline float sum_lanes(v16 x) {
    for (int step = LANES / 2; step > 0; step /= 2)
        for (int lane = 0; lane < step; lane++) x[lane] += x[lane + step];
    return x[0];
}

static inline float max_lanes(v16 x) {
    x = maximum(x, __builtin_shuffle(x, i16{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
    x = maximum(x, __builtin_shuffle(x, i16{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
    x = maximum(x, __builtin_shuffle(x, i16{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
    x = maximum(x, __builtin_shuffle(x, i16{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}));
    return x[0];
}

// e^x within 2 ulp (Cephes' polynomial); exactly 0 below -87 and exactly 1 at 0; x above 88 counts as 88.
static inline v16 exp_lanes(v16 x) {
    const v16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    i16 is_zero = x < splat(-87.0f);
    v16 bounded = select(x > splat(88.0f), splat(88.0f), select(is_zero, splat(-87.0f), x));
    v16 shifted = bounded * splat(1.44269504088896341f) + magic;
    v16 whole = shifted - magic;
    v16 r = bounded - whole * splat(0.693359375f);
    r = r - whole * splat(-2.12194440e-4f);
    v16 p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * (r * r) + r + splat(1.0f);
    i16 exponent = (reinterpret_cast<i16>(shifted) - reinterpret_cast<i16>(magic)) << 23;
    v16 result = reinterpret_cast<v16>(reinterpret_cast<i16>(p) + exponent);
    return select(is_zero, splat(0.0f), result);
}

// rows[i][j] becomes rows[j][i]: four rounds of interleaving row i with row i + 8.
static inline void transpose16(v16 *rows) {
    const i16 low{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    const i16 high{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    v16 other[LANES];
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 8; i++) {
            other[2 * i] = __builtin_shuffle(rows[i], rows[i + 8], low);
            other[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + 8], high);
        }
        for (int i = 0; i < 8; i++) {
            rows[2 * i] = __builtin_shuffle(other[i], other[i + 8], low);
            rows[2 * i + 1] = __builtin_shuffle(other[i], other[i + 8], high);
        }
    }
}
