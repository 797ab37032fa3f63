// The parts of a Llama's decoder layer over a flat batch of rows, each spread over the OpenMP threads of whoever calls.
// A row's bits depend on the row alone: neither on the number of rows nor on that of threads.
#pragma once

#include <cstdint>

#include "linear.h"

namespace kvrelay {

// outputs = inputs @ weight.T + bias, rounded; plus residual, rounded again, where there is one.
template <typename T, typename O>
void linear(const PackedWeight<T>& weight, const T* inputs, const T* residual, O* outputs, int64_t num_rows);

template <typename T>
void norm(const T* inputs, const T* weight, T* outputs, int64_t num_rows, int64_t size, float epsilon);

// outputs = rms_norm(inputs) @ weight.T + bias. normed: [num_rows][num_inputs], what norm() would give.
template <typename T>
void norm_linear(const PackedWeight<T>& weight, const T* inputs, const T* norm_weight, float epsilon, T* normed, T* outputs,
                 int64_t num_rows);

template <typename T>
void activate(const T* gate_up, T* outputs, int64_t num_rows, int64_t size);

// hidden += down(silu(gate(x)) * up(x)) of x = rms_norm(hidden), in place. normed, gate_up, activated: memory for these.
template <typename T>
void feed_forward(const PackedWeight<T>& gate_up_weight, const PackedWeight<T>& down_weight, const T* norm_weight, float epsilon,
                  T* hidden, T* normed, T* gate_up, T* activated, int64_t num_rows);

// Where a row's heads come from and go to. qkv: [num_rows][num_heads + 2 * num_kv_heads][head_dim]; query: [num_rows][num_heads]
// [head_dim]; cos, sin: [positions][head_dim / 2]. The caches are views of the pool, [blocks][block_size][num_kv_heads][head_dim],
// strided by block and token (in elements); slots: block * block_size + offset of the first num_slots rows, the others have none.
template <typename T>
struct HeadRows {
    const T* qkv;
    T* query;
    const int64_t* positions;
    const float* cos;
    const float* sin;
    T* key_cache;
    T* value_cache;
    const int64_t* slots;
    int64_t num_rows, num_slots, num_heads, num_kv_heads, head_dim, block_size, block_stride, token_stride;
};

// Turn queries and keys to their positions; keys and values go into the pool.
template <typename T>
void rotate_and_store(const HeadRows<T>& rows);

}  // namespace kvrelay
