// The innermost product, of up to MAX_TILE_ROWS rows and a panel of PANEL columns: every output is one fp32 sum over ascending k,
// whatever the number of rows. Projections and attention are built of it.
#pragma once

#include <cstdint>

#include "simd.h"

namespace kvrelay {

constexpr int PANEL = 32;  // output columns that are computed together
constexpr int VECTORS = PANEL / LANES;
#if defined(__AVX512F__)
constexpr int MAX_TILE_ROWS = 12;  // 24 of 32 registers accumulate
#else
constexpr int MAX_TILE_ROWS = 3;  // what 16 registers of AVX2, and 32 of NEON, hold
#endif
constexpr int64_t PREFETCH_BYTES = 2048;
constexpr int64_t LINE_BYTES = 64;

// Memory that will be read later, to be brought closer meanwhile: one line per pair of inputs that is multiplied.
struct Ahead {
    const char* next = nullptr;
    int64_t num_lines = 0;

    void step() {
        if (num_lines <= 0) return;
        __builtin_prefetch(next, 0, 2);
        next += LINE_BYTES;
        --num_lines;
    }
};

template <int ROWS>
struct Tile {
    vfloat sums[ROWS][VECTORS];
};

template <int ROWS>
inline void accumulate(Tile<ROWS>& tile, const float* panel, const float* inputs, int64_t num_inputs, Ahead ahead = {}) {
    for (int64_t k = 0; k < num_inputs; ++k) {
        ahead.step();
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
inline void accumulate(Tile<ROWS>& tile, const bf16* panel, const bf16* inputs, int64_t num_inputs, Ahead ahead = {}) {
    for (int64_t k = 0; k < num_inputs; k += 2) {
        ahead.step();
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

}  // namespace kvrelay
