// Matrix products over weights packed once. Knows nothing of torch.
//
// Sixteen outputs' weights lie together in a panel; N is padded with zeros to whole panels.
//
//     F32    [N/16][K][16]        floats
//     BF16   [N/16][K/2][16][2]   pairs of k, as the processor's bf16 dot product takes them
//     Q4     [N/16][K/32] groups of 4-bit values with a scale and an offset for each output (quantized.cpp)
//     Q8     [N/16][K/32] groups of 8-bit values with a scale for each output
#pragma once

#include <cstdint>

enum MatrixKind : int64_t { F32 = 0, BF16 = 1, Q4 = 2, Q8 = 3 };

struct Matrix {
    const void *packed;
    const float *bias;  // [N] or null
    int64_t N, K, kind;
};

// y [M, N] = x [M, K] W^T + bias. Every output is one chain of additions over k in one register lane, whatever the
// number of rows: a row's result is the same to the bit in any batch.
void multiply(const Matrix &matrix, const float *x, float *y, int64_t M);

// out [K] = row `row` of W.
void read_row(const Matrix &matrix, int64_t row, float *out);

// The same two for Q4 and Q8.
void multiply_quantized(const Matrix &matrix, const float *x, float *y, int64_t M);
void read_quantized_row(const Matrix &matrix, int64_t row, float *out);
