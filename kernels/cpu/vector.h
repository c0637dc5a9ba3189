// Sixteen floats at a time, in GCC's vector extensions: one register with AVX-512, two halves of eight elsewhere.
// Knows nothing of kernels. All arithmetic here is elementwise or in one fixed order.
//
// v16 floats, i16 and u16 integers; comparisons give i16 masks of 0 and -1.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

constexpr int LANES = 16;
#define INLINE static inline __attribute__((always_inline))

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint32_t u8 __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16)));
typedef float v8_unaligned __attribute__((vector_size(32), aligned(4)));
typedef uint16_t h8_unaligned __attribute__((vector_size(16), aligned(2)));

struct bfloat {
    uint16_t bits;
};

#ifdef __AVX512F__

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t u16 __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));
typedef float v16_unaligned __attribute__((vector_size(64), aligned(4)));
typedef uint16_t h16_unaligned __attribute__((vector_size(32), aligned(2)));

INLINE v16 splat(float x) { return v16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE i16 splat(int32_t x) { return i16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE i16 iota() { return i16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
INLINE i16 bits(v16 x) { return reinterpret_cast<i16>(x); }
INLINE v16 floats(i16 x) { return reinterpret_cast<v16>(x); }
INLINE v16 converted(i16 x) { return __builtin_convertvector(x, v16); }
INLINE v16 join(v8 low, v8 high) {
    v16 both;
    memcpy(&both, &low, sizeof low);
    memcpy(reinterpret_cast<char *>(&both) + sizeof low, &high, sizeof high);
    return both;
}
INLINE v8 low_half(v16 x) { return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7); }
INLINE v8 high_half(v16 x) { return __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15); }

INLINE v16 load(const float *p) { return *reinterpret_cast<const v16_unaligned *>(p); }
INLINE v16 load(const bfloat *p) {
    h16 narrow = *reinterpret_cast<const h16_unaligned *>(p);
    return reinterpret_cast<v16>(__builtin_convertvector(narrow, u16) << 16);
}
INLINE void store(float *p, v16 x) { *reinterpret_cast<v16_unaligned *>(p) = x; }
// Round to nearest even; NaN stays NaN.
INLINE void store(bfloat *p, v16 x) {
    u16 value = reinterpret_cast<u16>(x);
    u16 rounded = (value + 0x7fff + ((value >> 16) & 1)) >> 16;
    u16 is_nan = reinterpret_cast<u16>(x != x);
    rounded = (rounded & ~is_nan) | (is_nan & 0x7fc0);
    *reinterpret_cast<h16_unaligned *>(p) = __builtin_convertvector(rounded, h16);
}

#else

struct i16 {
    i8 low, high;
    int32_t operator[](int lane) const { return lane < 8 ? low[lane] : high[lane - 8]; }
};

struct v16 {
    v8 low, high;
    float operator[](int lane) const { return lane < 8 ? low[lane] : high[lane - 8]; }
};

#define LANEWISE(op)                                                                                 \
    INLINE v16 operator op(v16 a, v16 b) { return {a.low op b.low, a.high op b.high}; }               \
    INLINE v16 &operator op##=(v16 &a, v16 b) { return a = a op b; }
LANEWISE(+)
LANEWISE(-)
LANEWISE(*)
LANEWISE(/)
#undef LANEWISE
INLINE v16 operator-(v16 a) { return {-a.low, -a.high}; }

#define COMPARE(op)                                                                                  \
    INLINE i16 operator op(v16 a, v16 b) { return {a.low op b.low, a.high op b.high}; }
COMPARE(<)
COMPARE(>)
COMPARE(==)
COMPARE(!=)
#undef COMPARE

#define INTEGER(op)                                                                                  \
    INLINE i16 operator op(i16 a, i16 b) { return {a.low op b.low, a.high op b.high}; }               \
    INLINE i16 operator op(i16 a, int32_t b) { return {a.low op b, a.high op b}; }
INTEGER(+)
INTEGER(-)
INTEGER(&)
INTEGER(|)
INTEGER(<)
INTEGER(<<)
INTEGER(>>)
#undef INTEGER
INLINE i16 operator~(i16 a) { return {~a.low, ~a.high}; }
INLINE i16 &operator+=(i16 &a, i16 b) { return a = a + b; }

INLINE v8 splat8(float x) { return v8{x, x, x, x, x, x, x, x}; }
INLINE v16 splat(float x) { return {splat8(x), splat8(x)}; }
INLINE i16 splat(int32_t x) {
    const i8 half{x, x, x, x, x, x, x, x};
    return {half, half};
}
INLINE i16 iota() { return {i8{0, 1, 2, 3, 4, 5, 6, 7}, i8{8, 9, 10, 11, 12, 13, 14, 15}}; }
INLINE i16 bits(v16 x) { return {reinterpret_cast<i8>(x.low), reinterpret_cast<i8>(x.high)}; }
INLINE v16 floats(i16 x) { return {reinterpret_cast<v8>(x.low), reinterpret_cast<v8>(x.high)}; }
INLINE v16 converted(i16 x) { return {__builtin_convertvector(x.low, v8), __builtin_convertvector(x.high, v8)}; }
INLINE v16 join(v8 low, v8 high) { return {low, high}; }
INLINE v8 low_half(v16 x) { return x.low; }
INLINE v8 high_half(v16 x) { return x.high; }

INLINE v8 load8(const float *p) { return *reinterpret_cast<const v8_unaligned *>(p); }
INLINE v8 load8(const bfloat *p) {
    const h8 narrow = *reinterpret_cast<const h8_unaligned *>(p);
#ifdef __AVX2__
    const u8 wide = (u8)_mm256_cvtepu16_epi32((__m128i)narrow);  // the compiler takes five instructions
#else
    const u8 wide = __builtin_convertvector(narrow, u8);
#endif
    return reinterpret_cast<v8>(wide << 16);
}
INLINE void store8(float *p, v8 x) { *reinterpret_cast<v8_unaligned *>(p) = x; }
// Round to nearest even; NaN stays NaN.
INLINE void store8(bfloat *p, v8 x) {
    u8 value = reinterpret_cast<u8>(x);
    u8 rounded = (value + 0x7fff + ((value >> 16) & 1)) >> 16;
    u8 is_nan = reinterpret_cast<u8>(x != x);
    rounded = (rounded & ~is_nan) | (is_nan & 0x7fc0);
    *reinterpret_cast<h8_unaligned *>(p) = __builtin_convertvector(rounded, h8);
}
template <typename T>
INLINE v16 load(const T *p) {
    return {load8(p), load8(p + 8)};
}
template <typename T>
INLINE void store(T *p, v16 x) {
    store8(p, x.low);
    store8(p + 8, x.high);
}

#endif

INLINE float to_float(float x) { return x; }

INLINE float to_float(bfloat x) {
    uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

INLINE void from_float(float *p, float x) { *p = x; }

INLINE void from_float(bfloat *p, float x) {
    uint32_t value;
    memcpy(&value, &x, sizeof value);
    p->bits = x != x ? 0x7fc0 : static_cast<uint16_t>((value + 0x7fff + ((value >> 16) & 1)) >> 16);
}

INLINE i16 select(i16 mask, i16 a, i16 b) { return (mask & a) | (~mask & b); }

INLINE v16 select(i16 mask, v16 a, v16 b) { return floats(select(mask, bits(a), bits(b))); }

INLINE v16 maximum(v16 a, v16 b) { return select(a > b, a, b); }

INLINE float sum_lanes(v16 x) {
    v8 sum = low_half(x) + high_half(x);
    sum += __builtin_shuffle(sum, i8{4, 5, 6, 7, 0, 1, 2, 3});
    sum += __builtin_shuffle(sum, i8{2, 3, 0, 1, 6, 7, 4, 5});
    return sum[0] + sum[1];
}

INLINE float max_lanes(v16 x) {
    v8 low = low_half(x), high = high_half(x);
    v8 most = low > high ? low : high;
    v8 other = __builtin_shuffle(most, i8{4, 5, 6, 7, 0, 1, 2, 3});
    most = most > other ? most : other;
    other = __builtin_shuffle(most, i8{2, 3, 0, 1, 6, 7, 4, 5});
    most = most > other ? most : other;
    return most[0] > most[1] ? most[0] : most[1];
}

// e^x within 2 ulp (Cephes' polynomial); exactly 0 below -87 and exactly 1 at 0; x above 88 counts as 88.
INLINE v16 exp_lanes(v16 x) {
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
    i16 exponent = (bits(shifted) - bits(magic)) << 23;
    v16 result = floats(bits(p) + exponent);
    return select(is_zero, splat(0.0f), result);
}

// One register's lanes, for what works on squares of them.
#ifdef __AVX512F__

constexpr int REGISTER = 16;
typedef v16 lanes;
typedef u16 lane_bits;
typedef v16_unaligned lanes_unaligned;

// rows[i][j] becomes rows[j][i]: four rounds of interleaving row i with row i + 8.
INLINE void transpose(lanes *rows) {
    const i16 low{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    const i16 high{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    lanes other[REGISTER];
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

#else

constexpr int REGISTER = 8;
typedef v8 lanes;
typedef u8 lane_bits;
typedef v8_unaligned lanes_unaligned;

// rows[i][j] becomes rows[j][i]: pairs, then fours, then halves change places.
INLINE void transpose(lanes *r) {
    lanes t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = __builtin_shuffle(r[i], r[i + 1], i8{0, 8, 1, 9, 4, 12, 5, 13});
        t[i + 1] = __builtin_shuffle(r[i], r[i + 1], i8{2, 10, 3, 11, 6, 14, 7, 15});
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            u[i + 2 * j] = __builtin_shuffle(t[i + j], t[i + j + 2], i8{0, 1, 8, 9, 4, 5, 12, 13});
            u[i + 2 * j + 1] = __builtin_shuffle(t[i + j], t[i + j + 2], i8{2, 3, 10, 11, 6, 7, 14, 15});
        }
    for (int i = 0; i < 4; i++) {
        r[i] = __builtin_shuffle(u[i], u[i + 4], i8{0, 1, 2, 3, 8, 9, 10, 11});
        r[i + 4] = __builtin_shuffle(u[i], u[i + 4], i8{4, 5, 6, 7, 12, 13, 14, 15});
    }
}

#endif

INLINE lanes load_register(const float *p) { return *reinterpret_cast<const lanes_unaligned *>(p); }
INLINE void store_register(float *p, lanes x) { *reinterpret_cast<lanes_unaligned *>(p) = x; }
