// The operation of attention.h as a function of its own.

#include "attention.h"


#define EXPORT(T, suffix)                                                                                           \
    extern "C" void attention_##suffix(const T *query, const T *k_cache, const T *v_cache,                          \
                                       const int32_t *query_starts, const int32_t *context_lens,                    \
                                       const int32_t *block_tables, T *output, const AttentionShape *shape) {                \
        attention(query, k_cache, v_cache, query_starts, context_lens, block_tables, output, *shape);               \
    }

EXPORT(float, f32)
EXPORT(bfloat, bf16)
