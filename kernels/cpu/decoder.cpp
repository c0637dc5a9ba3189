// A whole forward pass of the Llama family in one call. Knows nothing of torch, requests or scheduling.
//
// tokens ─► embed ─► [ norm ─► qkv ─► rope + cache ─► attention ─► o ─► +norm ─► gate·up ─► silu ─► down ─► + ] × L
//                                                              rows that need logits ─► norm ─► head ─► logits
//
// What passes between the operations is float32, whatever the weights and the cache are stored as.

#include <vector>

#include "attention.h"
#include "crew.h"
#include "elementwise.h"
#include "matrix.h"

struct LayerWeights {
    const float *input_norm, *q_norm, *k_norm, *mlp_norm;  // q_norm and k_norm may be null
    Matrix qkv, output, gate_up, down;
};

struct Decoder {
    const LayerWeights *layers;
    const float *final_norm, *cos_sin;
    Matrix embedding, head;
    int64_t num_layers, hidden, num_heads, num_kv_heads, head_dim, inner;
    float eps, scale;
};

// T tokens of S sequences, R of which want logits; the cache is block-major (strides in elements).
struct Step {
    const int64_t *token_ids, *positions, *slots, *logit_rows;         // [T] [T] [T] [R]
    const int32_t *query_starts, *context_lens, *block_tables;         // [S+1] [S] [S, max_blocks]
    void *cache;                                                       // [blocks][layers][2][kv_heads][size][D]
    float *logits;                                                     // [R, vocab]
    int64_t T, S, R, max_blocks, block_size, is_bf16;
};

namespace {

// Where a pass keeps what it has between two operations; grows to the largest step and stays.
struct Workspace {
    std::vector<float> residual, hidden, wide, query, delta;

    void resize(const Decoder &d, int64_t T) {
        const int64_t heads = d.num_heads * d.head_dim, qkv = heads + 2 * d.num_kv_heads * d.head_dim;
        grow(residual, T * d.hidden);
        grow(hidden, T * std::max({d.hidden, heads, d.inner}));
        grow(wide, T * std::max(qkv, 2 * d.inner));
        grow(query, T * heads);
        grow(delta, T * d.hidden);
    }

    static void grow(std::vector<float> &v, int64_t size) {
        if (static_cast<int64_t>(v.size()) < size) v.resize(size);
    }
};

template <typename Cache>
void layer_pass(const Decoder &d, const LayerWeights &layer, const Step &step, Workspace &w, Cache *cache, bool first) {
    const int64_t head = step.block_size * d.head_dim, side = d.num_kv_heads * head, block = d.num_layers * 2 * side;
    const RopeShape rope{step.T, d.num_heads, d.num_kv_heads, d.head_dim, step.block_size, block, head};
    const AttentionShape attend{step.S,          d.num_heads, d.num_kv_heads, d.head_dim, step.block_size,
                                step.max_blocks, block,       head,           d.scale};
    float *residual = w.residual.data(), *hidden = w.hidden.data(), *wide = w.wide.data();
    float *query = w.query.data(), *delta = w.delta.data();
    add_rms_norm(first ? nullptr : delta, residual, layer.input_norm, hidden, step.T, d.hidden, d.eps);
    multiply(layer.qkv, hidden, wide, step.T);
    rope_and_cache(wide, d.cos_sin, step.positions, step.slots, layer.q_norm, layer.k_norm, d.eps, query, cache,
                   cache + side, rope);
    attention(query, cache, cache + side, step.query_starts, step.context_lens, step.block_tables, hidden, attend);
    multiply(layer.output, hidden, delta, step.T);
    add_rms_norm(delta, residual, layer.mlp_norm, hidden, step.T, d.hidden, d.eps);
    multiply(layer.gate_up, hidden, wide, step.T);
    silu_mul(wide, hidden, step.T, d.inner);
    multiply(layer.down, hidden, delta, step.T);
}

template <typename Cache>
void pass(const Decoder &d, const Step &step, Workspace &w) {
    Cache *cache = static_cast<Cache *>(step.cache);
    const int64_t layer_size = 2 * d.num_kv_heads * step.block_size * d.head_dim;
    for (int64_t t = 0; t < step.T; t++) read_row(d.embedding, step.token_ids[t], w.residual.data() + t * d.hidden);
    for (int64_t i = 0; i < d.num_layers; i++)
        layer_pass(d, d.layers[i], step, w, cache + i * layer_size, i == 0);
    float *chosen = w.query.data(), *normed = w.hidden.data();
    Workspace::grow(w.query, step.R * d.hidden);
    chosen = w.query.data();
    for (int64_t r = 0; r < step.R; r++) {
        const int64_t from = step.logit_rows[r] * d.hidden;
        for (int64_t n = 0; n < d.hidden; n++)
            chosen[r * d.hidden + n] = w.residual[from + n] + w.delta[from + n];
    }
    add_rms_norm<float>(nullptr, chosen, d.final_norm, normed, step.R, d.hidden, d.eps);
    multiply(d.head, normed, step.logits, step.R);
}

}  // namespace

extern "C" void decoder_step(const Decoder *decoder, const Step *step) {
    static thread_local Workspace workspace;
    const Shift shift;
    workspace.resize(*decoder, step->T);
    if (step->is_bf16)
        pass<bfloat>(*decoder, *step, workspace);
    else
        pass<float>(*decoder, *step, workspace);
}
