// A tile of keys and values as operands of accumulate() (tile.h): gathered from the pool's blocks and put in panels, once for all
// query rows that read it.
#pragma once

#include <cstdint>
#include <cstring>

#include "tile.h"

namespace kvrelay {

constexpr int TILE_KEYS = 64;  // positions per tile; tiles lie at multiples of it
constexpr int KEY_PANELS = TILE_KEYS / PANEL;

// Sizes of one head in 32-bit units: a float, or a pair of bf16, of which the last may be half empty.
template <typename T>
struct HeadSize {
    static constexpr int PER_UNIT = 4 / sizeof(T);
    explicit HeadSize(int64_t head_dim)
        : dim(head_dim), units((head_dim + PER_UNIT - 1) / PER_UNIT), padded_dim(units * PER_UNIT),
          panels((head_dim + PANEL - 1) / PANEL) {}
    int64_t dim, units, padded_dim;
    int64_t panels;  // of PANEL columns, for values
    int64_t columns() const { return panels * PANEL; }
};

#if defined(__AVX512F__)
// 16 rows of 16 units, turned: four rounds, each exchanging halves of what is 1, 2, 4 and 8 apart.
inline void transpose_16x16(vuint rows[LANES]) {
    vuint other[LANES];
    for (int i = 0; i < LANES; i += 2) {
        other[i] = __builtin_shufflevector(rows[i], rows[i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
        other[i + 1] = __builtin_shufflevector(rows[i], rows[i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    }
    for (int i = 0; i < LANES; ++i) {
        if (i & 2) continue;
        rows[i] = __builtin_shufflevector(other[i], other[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
        rows[i + 2] = __builtin_shufflevector(other[i], other[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    for (int i = 0; i < LANES; ++i) {
        if (i & 4) continue;
        other[i] = __builtin_shufflevector(rows[i], rows[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
        other[i + 4] = __builtin_shufflevector(rows[i], rows[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    }
    for (int i = 0; i < LANES / 2; ++i) {
        rows[i] = __builtin_shufflevector(other[i], other[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        rows[i + 8] = __builtin_shufflevector(other[i], other[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
}
#endif

// Some rows of up to 16 units each, turned into a panel of the given stride (in elements).
template <typename T>
inline void put_turned(vuint rows[LANES], int64_t num_units, T* panel) {
#if defined(__AVX512F__)
    transpose_16x16(rows);
#pragma GCC unroll 16
    for (int64_t u = 0; u < LANES; ++u)
        if (u < num_units) std::memcpy(panel + u * PANEL * HeadSize<T>::PER_UNIT, &rows[u], sizeof(vuint));
#else
    for (int64_t u = 0; u < num_units; ++u)
        for (int i = 0; i < LANES; ++i) {
            const uint32_t value = rows[i][u];
            std::memcpy(panel + (u * PANEL + i) * HeadSize<T>::PER_UNIT, &value, sizeof value);
        }
#endif
}

// keys: TILE_KEYS addresses of head.dim elements. panels: [KEY_PANELS][units][PANEL] units.
template <typename T>
inline void pack_keys(const T* const* keys, const HeadSize<T>& head, T* panels) {
    constexpr int64_t WHOLE = LANES * HeadSize<T>::PER_UNIT;
    for (int key = 0; key < TILE_KEYS; key += LANES) {
        T* panel = panels + (key / PANEL) * head.padded_dim * PANEL + (key % PANEL) * HeadSize<T>::PER_UNIT;
        int64_t first = 0;
        for (; first + WHOLE <= head.dim; first += WHOLE, panel += WHOLE * PANEL) {
            vuint rows[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; ++i) std::memcpy(&rows[i], keys[key + i] + first, sizeof(vuint));
            put_turned(rows, LANES, panel);
        }
        if (first < head.dim) {
            vuint rows[LANES] = {};
            for (int i = 0; i < LANES; ++i) std::memcpy(&rows[i], keys[key + i] + first, (head.dim - first) * sizeof(T));
            put_turned(rows, head.units - first / HeadSize<T>::PER_UNIT, panel);
        }
    }
}

inline void put_values(const float* const* values, int64_t column, int64_t count, float* panel) {
    for (int key = 0; key < TILE_KEYS; ++key) {
        float* target = panel + key * PANEL;
        if (count == PANEL) {
            std::memcpy(target, values[key] + column, PANEL * sizeof(float));
        } else {
            std::memset(target, 0, PANEL * sizeof(float));
            std::memcpy(target, values[key] + column, count * sizeof(float));
        }
    }
}

typedef uint16_t vrow __attribute__((vector_size(PANEL * 2)));

// Two positions side by side, which is the operand order of the pairwise dot product.
inline void put_pair(vrow first, vrow second, bf16* target) {
#if defined(__AVX512BW__)
    const vrow low = __builtin_shufflevector(first, second, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10,
                                             42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47);
    const vrow high = __builtin_shufflevector(first, second, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56,
                                              25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63);
    std::memcpy(target, &low, sizeof low);
    std::memcpy(target + PANEL, &high, sizeof high);
#else
    for (int c = 0; c < PANEL; ++c) {
        target[2 * c].bits = first[c];
        target[2 * c + 1].bits = second[c];
    }
#endif
}

inline void put_values(const bf16* const* values, int64_t column, int64_t count, bf16* panel) {
    for (int key = 0; key < TILE_KEYS; key += 2) {
        vrow first, second;
        if (count == PANEL) {
            std::memcpy(&first, values[key] + column, sizeof first);
            std::memcpy(&second, values[key + 1] + column, sizeof second);
        } else {
            first = second = vrow{};
            std::memcpy(&first, values[key] + column, count * sizeof(bf16));
            std::memcpy(&second, values[key + 1] + column, count * sizeof(bf16));
        }
        put_pair(first, second, panel + key * PANEL);
    }
}

// values: as keys. panels: [head.panels][TILE_KEYS / PER_UNIT][PANEL] units, columns beyond head.dim zero.
template <typename T>
inline void pack_values(const T* const* values, const HeadSize<T>& head, T* panels) {
    for (int64_t p = 0; p < head.panels; ++p) {
        const int64_t left = head.dim - p * PANEL;
        put_values(values, p * PANEL, left < PANEL ? left : PANEL, panels + p * TILE_KEYS * PANEL);
    }
}

}  // namespace kvrelay
