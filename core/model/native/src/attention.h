// Causal grouped-query attention over a paged KV pool, prefill chunks and decodes mixed in one flat batch.
//
// A row's bits depend on its query and on the keys and values it sees, and on nothing else: KV is read in tiles of TILE_TOKENS at
// absolute positions, folded into an online softmax (https://arxiv.org/abs/1805.02867) per split of SPLIT_TOKENS, and splits are
// merged in the order of positions, whoever computes them.
#pragma once

#include <cstdint>
#include <vector>

#include "simd.h"

namespace kvrelay {

constexpr int64_t TILE_TOKENS = 64;
constexpr int64_t SPLIT_TOKENS = 512;
constexpr int64_t QUERY_TILE_TOKENS = 64;

// Where a step's tokens lie. Request r owns rows query_start[r] to query_start[r + 1], the last tokens of its seq_lens[r].
// block_tables: [num_requests][max_blocks]. What is pointed to must outlive the plan.
struct BatchPlan {
    const int64_t* block_tables;
    const int64_t* query_start;
    const int64_t* seq_lens;
    int64_t num_requests, max_blocks, block_size;
};

// The step's work in pieces: some rows of a request, for one KV head, over all it sees or some splits of it.
struct Piece {
    int64_t request, first_row, num_rows, first_position, kv_head;
    int64_t first_split, end_split;
    int64_t partial;  // where its unmerged state goes, -1: it is the whole
};

template <typename T>
struct Heads {
    const T* query;  // [rows][num_heads][head_dim]
    T* output;       // the same
    const T* key_cache;  // [blocks][block_size][num_kv_heads][head_dim], strided by block and token (in elements)
    const T* value_cache;
    int64_t num_heads, num_kv_heads, head_dim, block_stride, token_stride;
    float scale, soft_cap;   // soft_cap 0: none
    int64_t sliding_window;  // positions that a token sees, its own included; 0: all up to its own
};

// Writes the output of every row of the batch. Spread over the OpenMP threads of whoever calls.
template <typename T>
void attend(const BatchPlan& plan, const Heads<T>& heads);

}  // namespace kvrelay
