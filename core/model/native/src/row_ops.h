// What a decoder layer does to one row at a time: norm, rotary embedding, activation. Bits depend on the row alone.
#pragma once

#include <cmath>
#include <cstdint>

#include "simd.h"

namespace kvrelay {

// RMSNorm (https://arxiv.org/abs/1910.07467) in float32; the normalized row is rounded to T before the weight multiplies it, as in
// the reference implementation.
template <typename T>
inline void rms_norm(const T* row, const T* weight, T* output, int64_t size, float epsilon) {
    vfloat squares = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const vfloat values = load(row + i);
        squares += values * values;
    }
    if (i < size) {
        const vfloat values = load_part(row + i, int(size - i));
        squares += values * values;
    }
    const float scale = 1.0f / std::sqrt(sum_lanes(squares) / float(size) + epsilon);
    for (i = 0; i + LANES <= size; i += LANES)
        store(output + i, load(weight + i) * rounded_to<T>(load(row + i) * scale));
    if (i < size) {
        const int count = int(size - i);
        store_part(output + i, load_part(weight + i, count) * rounded_to<T>(load_part(row + i, count) * scale), count);
    }
}

// RoPE (https://arxiv.org/abs/2104.09864) of one head, in float32, rounded once: pair (i, i + head_dim/2) is turned by the angle
// whose cosine and sine are cos[i] and sin[i].
template <typename T>
inline void rotate_head(const T* head, const float* cos, const float* sin, T* output, int64_t head_dim) {
    const int64_t half = head_dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const int count = int(half - i < LANES ? half - i : LANES);
        if (count == LANES) {
            const vfloat first = load(head + i), second = load(head + half + i), c = load(cos + i), s = load(sin + i);
            store(output + i, first * c - second * s);
            store(output + half + i, second * c + first * s);
        } else {
            const vfloat first = load_part(head + i, count), second = load_part(head + half + i, count);
            const vfloat c = load_part(cos + i, count), s = load_part(sin + i, count);
            store_part(output + i, first * c - second * s, count);
            store_part(output + half + i, second * c + first * s, count);
        }
    }
}

// SwiGLU (https://arxiv.org/abs/2002.05202): silu(gate) * up, silu in float32 and rounded to T. gate_up: [2 * size], gate first.
template <typename T>
inline void silu_multiply(const T* gate_up, T* output, int64_t size) {
    const T *gate = gate_up, *up = gate_up + size;
    for (int64_t i = 0; i < size; i += LANES) {
        const int count = int(size - i < LANES ? size - i : LANES);
        const bool is_whole = count == LANES;
        const vfloat g = is_whole ? load(gate + i) : load_part(gate + i, count);
        const vfloat u = is_whole ? load(up + i) : load_part(up + i, count);
        const vfloat activated = rounded_to<T>(g / (exp_lanes(-g) + 1.0f)) * u;
        if (is_whole) store(output + i, activated);
        else store_part(output + i, activated, count);
    }
}

}  // namespace kvrelay
