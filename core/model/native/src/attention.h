// Causal grouped-query attention over the paged KV pool, for prefill chunks and decodes in one flat batch; see core/model/attention.py,
// whose contract this keeps: a row's bits depend on its query and the K and V up to its position, and on nothing else.
#pragma once

#include <cstdint>

#include "simd.h"

namespace kvrelay {

// One layer of one step. Request r owns rows query_start[r] to query_start[r + 1] of query and output, the last of its sequence
// of seq_lens[r] tokens, whose K and V are in the caches already. The caches are views of the pool, [blocks][block_size]
// [num_kv_heads][head_dim], strided by block and token (in elements); block_tables: [num_requests][table_stride]. sliding_window,
// soft_cap: 0 for none.
template <typename T>
struct AttentionArgs {
    const T* query;  // [num_rows][num_heads][head_dim]
    T* output;       // the same; rows that no request owns become zero
    const T* key_cache;
    const T* value_cache;
    const int64_t* block_tables;
    const int64_t* query_start;
    const int64_t* seq_lens;
    int64_t num_rows, num_requests, table_stride;
    int64_t num_heads, num_kv_heads, head_dim;
    int64_t block_size, block_stride, token_stride;
    int64_t sliding_window;
    float scale, soft_cap;
};

// T: float or bf16. Spread over the OpenMP threads of whoever calls.
template <typename T>
void paged_attention(const AttentionArgs<T>& args);

}  // namespace kvrelay
