// Packed linear layers: outputs = inputs @ weight.T (+ bias), each output one fp32 accumulator over ascending k, always.
#pragma once

#include <cstdint>

#include "tile.h"

namespace kvrelay {

// A weight [num_outputs, num_inputs] of T as panels of 32 outputs, so that one load has neighbouring columns of one input:
// float [panels][num_inputs][32]; bf16 [panels][num_inputs / 2][32][2], pairs of inputs side by side, which is the operand order of
// AVX512-BF16's dot product. num_inputs is even; columns beyond num_outputs are zero.
template <typename T>
struct PackedWeight {
    const T* panels = nullptr;
    const T* bias = nullptr;  // [num_outputs] or null
    int64_t num_inputs = 0;
    int64_t num_outputs = 0;

    int64_t num_panels() const { return (num_outputs + PANEL - 1) / PANEL; }
};

// Outputs of rows [first_row, end_row) and panels [first_panel, end_panel), each rounded to O once. inputs: [rows][num_inputs],
// outputs: [rows][num_outputs]. A residual [rows][num_outputs] is added to the rounded output, and the sum rounded (it may be
// `outputs`).
template <typename T, typename O>
void multiply(const PackedWeight<T>& weight, const T* inputs, const T* residual, O* outputs, int64_t first_row, int64_t end_row,
              int64_t first_panel, int64_t end_panel);

}  // namespace kvrelay
