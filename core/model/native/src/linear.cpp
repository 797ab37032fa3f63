#include "linear.h"

#include <algorithm>

namespace kvrelay {
namespace {

constexpr int VECTORS = PANEL / LANES;
#if defined(__AVX512F__)
constexpr int MAX_TILE_ROWS = 12;  // 24 of 32 registers accumulate
#else
constexpr int MAX_TILE_ROWS = 3;  // what 16 registers of AVX2, and 32 of NEON, hold
#endif
constexpr int64_t BLOCK_ROWS = 96;  // rows whose inputs stay in the cache while the panels pass
constexpr int64_t PREFETCH_BYTES = 2048;

template <int ROWS>
struct Tile {
    vfloat sums[ROWS][VECTORS];
};

template <int ROWS>
inline void accumulate(Tile<ROWS>& tile, const float* panel, const float* inputs, int64_t num_inputs) {
    for (int64_t k = 0; k < num_inputs; ++k) {
        const vfloat left = load(panel + k * PANEL), right = load(panel + k * PANEL + LANES);
        if (ROWS <= 4) __builtin_prefetch(panel + k * PANEL + PREFETCH_BYTES / sizeof(float));
        for (int row = 0; row < ROWS; ++row) {
            const vfloat input = splat(inputs[row * num_inputs + k]);
            tile.sums[row][0] += input * left;
            tile.sums[row][1] += input * right;
        }
    }
}

template <int ROWS>
inline void accumulate(Tile<ROWS>& tile, const bf16* panel, const bf16* inputs, int64_t num_inputs) {
    for (int64_t k = 0; k < num_inputs; k += 2) {
        const bf16* pairs = panel + k * PANEL;
        if (ROWS <= 4) {
            __builtin_prefetch(pairs + PREFETCH_BYTES / sizeof(bf16));
            __builtin_prefetch(pairs + PREFETCH_BYTES / sizeof(bf16) + 32);
        }
#if defined(__AVX512BF16__)
        const __m512bh left = (__m512bh)_mm512_loadu_si512(pairs), right = (__m512bh)_mm512_loadu_si512(pairs + 2 * LANES);
        for (int row = 0; row < ROWS; ++row) {
            int32_t pair;
            std::memcpy(&pair, inputs + row * num_inputs + k, sizeof pair);
            const __m512bh input = (__m512bh)_mm512_set1_epi32(pair);
            tile.sums[row][0] = (vfloat)_mm512_dpbf16_ps((__m512)tile.sums[row][0], input, left);
            tile.sums[row][1] = (vfloat)_mm512_dpbf16_ps((__m512)tile.sums[row][1], input, right);
        }
#else
        for (int half = 0; half < VECTORS; ++half) {
            vuint both;  // the second of each pair above the first
            std::memcpy(&both, pairs + half * 2 * LANES, sizeof both);
            const vfloat first = reinterpret_cast<vfloat>(both << 16), second = reinterpret_cast<vfloat>(both & 0xffff0000u);
            for (int row = 0; row < ROWS; ++row) {
                tile.sums[row][half] += splat(to_float(inputs[row * num_inputs + k])) * first;
                tile.sums[row][half] += splat(to_float(inputs[row * num_inputs + k + 1])) * second;
            }
        }
#endif
    }
}

template <int ROWS, typename T, typename O>
void multiply_tile(const PackedWeight<T>& weight, const T* inputs, const T* residual, O* outputs, int64_t panel) {
    Tile<ROWS> tile = {};
    accumulate<ROWS>(tile, weight.panels + panel * PANEL * weight.num_inputs, inputs, weight.num_inputs);
    for (int half = 0; half < VECTORS; ++half) {
        const int64_t column = panel * PANEL + half * LANES;
        const int count = int(std::min<int64_t>(LANES, weight.num_outputs - column));
        if (count <= 0) break;
        const vfloat bias = weight.bias ? load_part(weight.bias + column, count) : vfloat{};
        for (int row = 0; row < ROWS; ++row) {
            vfloat sum = tile.sums[row][half];
            if (weight.bias) sum += bias;
            const int64_t at = row * weight.num_outputs + column;
            if (count == LANES) {
                if (residual) sum = load(residual + at) + rounded_to<T>(sum);
                store(outputs + at, sum);
            } else {
                if (residual) sum = load_part(residual + at, count) + rounded_to<T>(sum);
                store_part(outputs + at, sum, count);
            }
        }
    }
}

template <int ROWS, typename T, typename O>
void multiply_rows(int64_t num_rows, const PackedWeight<T>& weight, const T* inputs, const T* residual, O* outputs, int64_t panel) {
    if constexpr (ROWS > 1) {
        if (num_rows < ROWS) return multiply_rows<ROWS - 1, T, O>(num_rows, weight, inputs, residual, outputs, panel);
    }
    multiply_tile<ROWS, T, O>(weight, inputs, residual, outputs, panel);
}

}  // namespace

template <typename T, typename O>
void multiply(const PackedWeight<T>& weight, const T* inputs, const T* residual, O* outputs, int64_t first_row, int64_t end_row,
              int64_t first_panel, int64_t end_panel) {
    for (int64_t block = first_row; block < end_row; block += BLOCK_ROWS) {
        const int64_t block_rows = std::min(BLOCK_ROWS, end_row - block);
        const int64_t num_tiles = (block_rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
        for (int64_t panel = first_panel; panel < end_panel; ++panel)
            for (int64_t tile = 0; tile < num_tiles; ++tile) {  // of nearly equal numbers of rows
                const int64_t row = block + tile * block_rows / num_tiles;
                const int64_t rows = block + (tile + 1) * block_rows / num_tiles - row;
                const int64_t at = row * weight.num_outputs;
                multiply_rows<MAX_TILE_ROWS, T, O>(rows, weight, inputs + row * weight.num_inputs,
                                                   residual ? residual + at : nullptr, outputs + at, panel);
            }
    }
}

template void multiply(const PackedWeight<float>&, const float*, const float*, float*, int64_t, int64_t, int64_t, int64_t);
template void multiply(const PackedWeight<bf16>&, const bf16*, const bf16*, bf16*, int64_t, int64_t, int64_t, int64_t);
template void multiply(const PackedWeight<bf16>&, const bf16*, const bf16*, float*, int64_t, int64_t, int64_t, int64_t);

}  // namespace kvrelay
