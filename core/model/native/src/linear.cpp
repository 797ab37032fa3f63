#include "linear.h"

#include <algorithm>

namespace kvrelay {
namespace {

constexpr int64_t BLOCK_ROWS = 96;  // rows whose inputs stay in the cache while the panels pass

template <int ROWS, typename T, typename O>
void multiply_tile(const PackedWeight<T>& weight, const T* inputs, const T* residual, O* outputs, int64_t panel, Ahead ahead) {
    Tile<ROWS> tile = {};
    accumulate<ROWS>(tile, weight.panels + panel * PANEL * weight.num_inputs, inputs, weight.num_inputs, ahead);
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
void multiply_rows(int64_t num_rows, const PackedWeight<T>& weight, const T* inputs, const T* residual, O* outputs, int64_t panel,
                   Ahead ahead) {
    if constexpr (ROWS > 1) {
        if (num_rows < ROWS) return multiply_rows<ROWS - 1, T, O>(num_rows, weight, inputs, residual, outputs, panel, ahead);
    }
    multiply_tile<ROWS, T, O>(weight, inputs, residual, outputs, panel, ahead);
}

}  // namespace

template <typename T, typename O>
void multiply(const PackedWeight<T>& weight, const T* inputs, const T* residual, O* outputs, int64_t first_row, int64_t end_row,
              int64_t first_panel, int64_t end_panel) {
    for (int64_t block = first_row; block < end_row; block += BLOCK_ROWS) {
        const int64_t block_rows = std::min(BLOCK_ROWS, end_row - block);
        const int64_t num_tiles = (block_rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
        const int64_t panel_lines = PANEL * weight.num_inputs * int64_t(sizeof(T)) / LINE_BYTES;
        for (int64_t panel = first_panel; panel < end_panel; ++panel) {
            const char* next_panel = reinterpret_cast<const char*>(weight.panels + (panel + 1) * PANEL * weight.num_inputs);
            for (int64_t tile = 0; tile < num_tiles; ++tile) {  // of nearly equal numbers of rows
                const int64_t row = block + tile * block_rows / num_tiles;
                const int64_t rows = block + (tile + 1) * block_rows / num_tiles - row;
                const int64_t at = row * weight.num_outputs;
                Ahead ahead;  // each tile of rows fetches its part of the next panel; a single one finds its own as it comes
                if (num_tiles > 1 && panel + 1 < end_panel) {
                    const int64_t first_line = panel_lines * tile / num_tiles;
                    ahead = {next_panel + first_line * LINE_BYTES, panel_lines * (tile + 1) / num_tiles - first_line};
                }
                multiply_rows<MAX_TILE_ROWS, T, O>(rows, weight, inputs + row * weight.num_inputs,
                                                   residual ? residual + at : nullptr, outputs + at, panel, ahead);
            }
        }
    }
}

template void multiply(const PackedWeight<float>&, const float*, const float*, float*, int64_t, int64_t, int64_t, int64_t);
template void multiply(const PackedWeight<bf16>&, const bf16*, const bf16*, bf16*, int64_t, int64_t, int64_t, int64_t);
template void multiply(const PackedWeight<bf16>&, const bf16*, const bf16*, float*, int64_t, int64_t, int64_t, int64_t);

}  // namespace kvrelay
