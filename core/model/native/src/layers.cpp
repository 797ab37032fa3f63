#include "layers.h"

#include <omp.h>

#include <algorithm>
#include <vector>

#include "row_ops.h"

namespace kvrelay {
namespace {

constexpr int64_t BLOCK_ROWS = 96;
constexpr int64_t FEW_ROWS = 4;  // for so few, every thread norms and activates all by itself rather than wait for the others
constexpr int64_t MIN_ROWS_PER_THREAD = 48;  // with fewer, threads share the rows and divide the outputs

// Whether threads take blocks of rows, each with all outputs, or all rows and some outputs each (then weights are read once).
inline bool is_split_by_rows(int64_t num_rows) { return num_rows >= MIN_ROWS_PER_THREAD * omp_get_max_threads(); }

inline int64_t num_row_blocks(int64_t num_rows) {
    const int64_t threads = omp_get_max_threads();
    const int64_t blocks = (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    return (blocks + threads - 1) / threads * threads;  // the same for each thread, and of nearly equal size
}

template <typename T, typename O>
inline void my_panels(const PackedWeight<T>& weight, const T* inputs, const T* residual, O* outputs, int64_t num_rows) {
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads(), panels = weight.num_panels();
    multiply(weight, inputs, residual, outputs, 0, num_rows, panels * thread / threads, panels * (thread + 1) / threads);
}

// Memory of the calling thread, valid until it asks again.
template <typename T>
inline T* own_memory(int64_t size) {
    static thread_local std::vector<T> memory;
    if (int64_t(memory.size()) < size) memory.resize(size);
    return memory.data();
}

template <typename Work>
inline void for_row_blocks(int64_t num_rows, Work work) {
    const int64_t blocks = num_row_blocks(num_rows);
#pragma omp parallel for schedule(dynamic)
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t first = num_rows * block / blocks, end = num_rows * (block + 1) / blocks;
        if (first < end) work(first, end);
    }
}

}  // namespace

template <typename T, typename O>
void linear(const PackedWeight<T>& weight, const T* inputs, const T* residual, O* outputs, int64_t num_rows) {
    if (is_split_by_rows(num_rows)) {
        for_row_blocks(num_rows, [&](int64_t first, int64_t end) {
            multiply(weight, inputs, residual, outputs, first, end, 0, weight.num_panels());
        });
        return;
    }
#pragma omp parallel
    my_panels(weight, inputs, residual, outputs, num_rows);
}

template <typename T>
void norm(const T* inputs, const T* weight, T* outputs, int64_t num_rows, int64_t size, float epsilon) {
#pragma omp parallel for schedule(static) if (num_rows > 8)
    for (int64_t row = 0; row < num_rows; ++row) rms_norm(inputs + row * size, weight, outputs + row * size, size, epsilon);
}

template <typename T>
void norm_linear(const PackedWeight<T>& weight, const T* inputs, const T* norm_weight, float epsilon, T* normed, T* outputs,
                 int64_t num_rows) {
    const int64_t size = weight.num_inputs;
    const auto norm_row = [&](int64_t row) { rms_norm(inputs + row * size, norm_weight, normed + row * size, size, epsilon); };
    if (is_split_by_rows(num_rows)) {
        for_row_blocks(num_rows, [&](int64_t first, int64_t end) {
            for (int64_t row = first; row < end; ++row) norm_row(row);
            multiply<T, T>(weight, normed, nullptr, outputs, first, end, 0, weight.num_panels());
        });
        return;
    }
    if (num_rows <= FEW_ROWS) {
#pragma omp parallel
        {
            T* own = own_memory<T>(num_rows * size);
            for (int64_t row = 0; row < num_rows; ++row) rms_norm(inputs + row * size, norm_weight, own + row * size, size, epsilon);
            my_panels<T, T>(weight, own, nullptr, outputs, num_rows);
        }
        return;
    }
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < num_rows; ++row) norm_row(row);
        my_panels<T, T>(weight, normed, nullptr, outputs, num_rows);
    }
}

template <typename T>
void activate(const T* gate_up, T* outputs, int64_t num_rows, int64_t size) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < num_rows; ++row) silu_multiply(gate_up + row * 2 * size, outputs + row * size, size);
}

template <typename T>
void feed_forward(const PackedWeight<T>& gate_up_weight, const PackedWeight<T>& down_weight, const T* norm_weight, float epsilon,
                  T* hidden, T* normed, T* gate_up, T* activated, int64_t num_rows) {
    const int64_t size = gate_up_weight.num_inputs, inner = down_weight.num_inputs;
    const auto norm_row = [&](int64_t row) { rms_norm(hidden + row * size, norm_weight, normed + row * size, size, epsilon); };
    const auto activate_row = [&](int64_t row) { silu_multiply(gate_up + row * 2 * inner, activated + row * inner, inner); };
    if (is_split_by_rows(num_rows)) {  // a block's rows go through all of it while they are in the cache
        for_row_blocks(num_rows, [&](int64_t first, int64_t end) {
            for (int64_t row = first; row < end; ++row) norm_row(row);
            multiply<T, T>(gate_up_weight, normed, nullptr, gate_up, first, end, 0, gate_up_weight.num_panels());
            for (int64_t row = first; row < end; ++row) activate_row(row);
            multiply<T, T>(down_weight, activated, hidden, hidden, first, end, 0, down_weight.num_panels());
        });
        return;
    }
    if (num_rows <= FEW_ROWS) {
#pragma omp parallel
        {
            T* own = own_memory<T>(num_rows * std::max(size, inner));
            for (int64_t row = 0; row < num_rows; ++row) rms_norm(hidden + row * size, norm_weight, own + row * size, size, epsilon);
            my_panels<T, T>(gate_up_weight, own, nullptr, gate_up, num_rows);
#pragma omp barrier
            for (int64_t row = 0; row < num_rows; ++row) silu_multiply(gate_up + row * 2 * inner, own + row * inner, inner);
            my_panels<T, T>(down_weight, own, hidden, hidden, num_rows);
        }
        return;
    }
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < num_rows; ++row) norm_row(row);
        my_panels<T, T>(gate_up_weight, normed, nullptr, gate_up, num_rows);
#pragma omp barrier
#pragma omp for schedule(static)
        for (int64_t row = 0; row < num_rows; ++row) activate_row(row);
        my_panels<T, T>(down_weight, activated, hidden, hidden, num_rows);
    }
}

template <typename T>
void rotate_and_store(const HeadRows<T>& rows) {
    const int64_t dim = rows.head_dim, half = dim / 2;
#pragma omp parallel for schedule(static) if (rows.num_rows > 8)
    for (int64_t row = 0; row < rows.num_rows; ++row) {
        const T* heads = rows.qkv + row * (rows.num_heads + 2 * rows.num_kv_heads) * dim;
        const float *cos = rows.cos + rows.positions[row] * half, *sin = rows.sin + rows.positions[row] * half;
        for (int64_t head = 0; head < rows.num_heads; ++head)
            rotate_head(heads + head * dim, cos, sin, rows.query + (row * rows.num_heads + head) * dim, dim);
        if (row >= rows.num_slots) continue;
        const int64_t slot = rows.slots[row];
        const int64_t at = slot / rows.block_size * rows.block_stride + slot % rows.block_size * rows.token_stride;
        const T *keys = heads + rows.num_heads * dim, *values = keys + rows.num_kv_heads * dim;
        for (int64_t head = 0; head < rows.num_kv_heads; ++head)
            rotate_head(keys + head * dim, cos, sin, rows.key_cache + at + head * dim, dim);
        std::copy(values, values + rows.num_kv_heads * dim, rows.value_cache + at);
    }
}

#define INSTANTIATE(T)                                                                                                             \
    template void linear(const PackedWeight<T>&, const T*, const T*, T*, int64_t);                                                 \
    template void norm(const T*, const T*, T*, int64_t, int64_t, float);                                                           \
    template void norm_linear(const PackedWeight<T>&, const T*, const T*, float, T*, T*, int64_t);                                 \
    template void activate(const T*, T*, int64_t, int64_t);                                                                        \
    template void feed_forward(const PackedWeight<T>&, const PackedWeight<T>&, const T*, float, T*, T*, T*, T*, int64_t);          \
    template void rotate_and_store(const HeadRows<T>&);

INSTANTIATE(float)
INSTANTIATE(bf16)
template void linear(const PackedWeight<bf16>&, const bf16*, const bf16*, float*, int64_t);

}  // namespace kvrelay
