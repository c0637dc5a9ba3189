// How 4- and 8-bit weights lie in memory: groups of 32 values of K for sixteen outputs. See matrix.h.
#pragma once

#include "matrix.h"
#include "vector.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

constexpr int GROUP = 32;          // k of a group
constexpr int QUADS = GROUP / 4;   // integer products take four k at a time

// A group of a panel. Q4: two quads share the bytes, the earlier one in the low halves.
struct Group4 {
    uint16_t scales[LANES], offsets[LANES];  // float16
    uint8_t pairs[QUADS / 2][LANES][4];
};

struct Group8 {
    uint16_t scales[LANES];
#ifdef __AVX512VNNI__
    int8_t quads[QUADS][LANES][4];
#else
    int8_t rows[GROUP][LANES];  // by k: without that instruction, floats are faster
#endif

    // How far the value of (k, lane) lies from the first.
    static int64_t place(int64_t k, int64_t lane) {
#ifdef __AVX512VNNI__
        return (k / 4 * LANES + lane) * 4 + k % 4;
#else
        return k * LANES + lane;
#endif
    }

    int8_t *values() { return reinterpret_cast<int8_t *>(this) + sizeof scales; }
    const int8_t *values() const { return reinterpret_cast<const int8_t *>(this) + sizeof scales; }
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
