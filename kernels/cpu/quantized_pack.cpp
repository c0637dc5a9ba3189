// From GGUF's blocks to groups of panels, and back to single rows.

#include <algorithm>

#include "quantized.h"

namespace {

INLINE uint16_t minus_eight_times(uint16_t half) {
    uint16_t size = half & 0x7fff;
    for (int i = 0; i < 3; i++) size += size < 1 << 10 ? size : 1 << 10;  // doubled: below 2^10 it has no exponent
    return static_cast<uint16_t>(size | (~half & 0x8000));
}

}  // namespace

void read_quantized_row(const Matrix &matrix, int64_t row, float *out) {
    const int64_t groups = matrix.K / GROUP, lane = row % LANES;
    for (int64_t g = 0; g < groups; g++)
        for (int k = 0; k < GROUP; k++) {
            const int64_t at = row / LANES * groups + g;
            if (matrix.kind == Q4) {
                const Group4 &group = static_cast<const Group4 *>(matrix.packed)[at];
                const int q = group.pairs[k / 8][lane][k % 4] >> (k / 4 % 2 * 4) & 15;
                out[g * GROUP + k] = half_to_float(group.scales[lane]) * q + half_to_float(group.offsets[lane]);
            } else {
                const Group8 &group = static_cast<const Group8 *>(matrix.packed)[at];
                out[g * GROUP + k] = half_to_float(group.scales[lane]) * group.values()[Group8::place(k, lane)];
            }
        }
}

// GGUF's blocks of 32: float16 d, for Q4_1 float16 m, then the values; of four bits, the first sixteen in the low
// halves of the bytes and the others in the high ones. Q4_0 means d (q - 8).
extern "C" void pack_q4(const uint8_t *blocks, void *packed, int64_t N, int64_t K, int64_t has_offset) {
    const int64_t groups = K / GROUP, block_bytes = 2 + 2 * has_offset + GROUP / 2;
    Group4 *panels = static_cast<Group4 *>(packed);
    memset(packed, 0, (N + LANES - 1) / LANES * groups * sizeof(Group4));
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < (N + LANES - 1) / LANES; panel++)
        for (int64_t row = panel * LANES; row < std::min<int64_t>(N, (panel + 1) * LANES); row++)
            for (int64_t g = 0; g < groups; g++) {
                const uint8_t *block = blocks + (row * groups + g) * block_bytes;
                Group4 &group = panels[panel * groups + g];
                const int64_t lane = row % LANES;
                memcpy(&group.scales[lane], block, 2);
                if (has_offset)
                    memcpy(&group.offsets[lane], block + 2, 2);
                else
                    group.offsets[lane] = minus_eight_times(group.scales[lane]);
                const uint8_t *values = block + block_bytes - GROUP / 2;
                for (int k = 0; k < GROUP; k++) {
                    const int q = k < 16 ? values[k] & 15 : values[k - 16] >> 4;
                    group.pairs[k / 8][lane][k % 4] |= static_cast<uint8_t>(q << (k / 4 % 2 * 4));
                }
            }
}

extern "C" void pack_q8(const uint8_t *blocks, void *packed, int64_t N, int64_t K) {
    const int64_t groups = K / GROUP;
    Group8 *panels = static_cast<Group8 *>(packed);
    memset(packed, 0, (N + LANES - 1) / LANES * groups * sizeof(Group8));
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < (N + LANES - 1) / LANES; panel++)
        for (int64_t row = panel * LANES; row < std::min<int64_t>(N, (panel + 1) * LANES); row++)
            for (int64_t g = 0; g < groups; g++) {
                const uint8_t *block = blocks + (row * groups + g) * (2 + GROUP);
                Group8 &group = panels[panel * groups + g];
                memcpy(&group.scales[row % LANES], block, 2);
                for (int k = 0; k < GROUP; k++) group.values()[Group8::place(k, row % LANES)] = static_cast<int8_t>(block[2 + k]);
            }
}

extern "C" int64_t packed_group_bytes(int64_t kind) { return kind == Q4 ? sizeof(Group4) : sizeof(Group8); }
