// Reading memory as fast as one core can: what products of few rows are compared with. Nothing else uses it.

#include "vector.h"

namespace {

constexpr int64_t AHEAD = 64;  // lines

// STREAMS parts of equal size side by side; what does not fill one is left out.
template <int STREAMS>
float sum_streams(const float *data, int64_t size) {
    const int64_t part = size / STREAMS / LANES * LANES;
    v16 sums[STREAMS];
    for (int i = 0; i < STREAMS; i++) sums[i] = splat(0.0f);
    for (int64_t n = 0; n < part; n += LANES)
        for (int i = 0; i < STREAMS; i++) {
            __builtin_prefetch(data + i * part + n + AHEAD * LANES);
            sums[i] += load(data + i * part + n);
        }
    for (int i = 1; i < STREAMS; i++) sums[0] += sums[i];
    return sum_lanes(sums[0]);
}

}  // namespace

// The sum of data [size], read as 4 streams or else as 8.
extern "C" float sum_by_streams(const float *data, int64_t size, int64_t num_streams) {
    return num_streams == 4 ? sum_streams<4>(data, size) : sum_streams<8>(data, size);
}
