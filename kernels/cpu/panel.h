// What every product over panels of sixteen outputs needs, whatever the weights are. Knows nothing of their kinds.
#pragma once

#include <algorithm>
#include <type_traits>

#include "vector.h"

// Calls body(n) with n a constant: exactly `rows`, which is at most MAX. So a body is compiled for each number of rows
// and keeps its sums in registers.
template <int MAX, typename Body>
INLINE void with_rows(int64_t rows, Body body) {
    if constexpr (MAX > 1) {
        if (rows < MAX) return with_rows<MAX - 1>(rows, body);
    }
    body(std::integral_constant<int, MAX>{});
}

// body(n, row) for rows first..end, at most MAX at a time and as evenly as can be: few rows have too few sums in flight
// to keep the processor busy.
template <int MAX, typename Body>
INLINE void by_rows(int64_t first, int64_t end, Body body) {
    for (int64_t parts = (end - first + MAX - 1) / MAX, row = first; parts > 0; parts--) {
        const int64_t rows = (end - row + parts - 1) / parts;
        with_rows<MAX>(rows, [&](auto n) { body(n, row); });
        row += rows;
    }
}

// For loops that must have the registers to themselves: inlined into what calls them they lose sums to memory.
#define APART __attribute__((noinline))

// One row's sums of a panel, plus its biases (or null), to `out`: `width` of them, fewer at the end of N.
INLINE void write(float *out, v16 sums, const float *bias, int64_t width) {
    if (width == LANES) {
        store(out, bias ? sums + load(bias) : sums);
        return;
    }
    float all[LANES];
    store(all, sums);
    for (int64_t lane = 0; lane < width; lane++) out[lane] = bias ? all[lane] + bias[lane] : all[lane];
}
