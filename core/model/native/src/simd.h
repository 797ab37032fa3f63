// Vectors of 16 floats by the compiler's vector extensions, so that AVX-512, AVX2 and NEON are one source; and bfloat16.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace kvrelay {

constexpr int LANES = 16;
typedef float vfloat __attribute__((vector_size(LANES * 4)));
typedef uint32_t vuint __attribute__((vector_size(LANES * 4)));
typedef int32_t vint __attribute__((vector_size(LANES * 4)));
typedef uint16_t vhalf __attribute__((vector_size(LANES * 2)));

struct bf16 {
    uint16_t bits;
};

inline vfloat splat(float value) { return vfloat{} + value; }

inline vfloat load(const float* source) {
    vfloat value;
    std::memcpy(&value, source, sizeof value);
    return value;
}

inline vfloat load(const bf16* source) {
    vhalf value;
    std::memcpy(&value, source, sizeof value);
    return reinterpret_cast<vfloat>(__builtin_convertvector(value, vuint) << 16);
}

inline void store(float* target, vfloat value) { std::memcpy(target, &value, sizeof value); }

// Round to nearest, ties to even; a NaN stays one.
inline vhalf round_to_bf16(vfloat value) {
#if defined(__AVX512BF16__)
    return (vhalf)_mm512_cvtneps_pbh((__m512)value);
#else
    const vuint bits = reinterpret_cast<vuint>(value);
    const vuint rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const vuint is_nan = reinterpret_cast<vuint>(value != value);
    return __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), vhalf);
#endif
}

inline void store(bf16* target, vfloat value) {
    const vhalf rounded = round_to_bf16(value);
    std::memcpy(target, &rounded, sizeof rounded);
}

inline float to_float(float value) { return value; }

inline float to_float(bf16 value) {
    const uint32_t bits = uint32_t(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

// The first `count` lanes; the others are zero.
template <typename T>
inline vfloat load_part(const T* source, int count) {
    T padded[LANES] = {};
    std::memcpy(padded, source, count * sizeof(T));
    return load(padded);
}

template <typename T>
inline void store_part(T* target, vfloat value, int count) {
    T padded[LANES];
    store(padded, value);
    std::memcpy(target, padded, count * sizeof(T));
}

// What storing as T and loading again gives.
template <typename T>
inline vfloat rounded_to(vfloat value) {
    T stored[LANES];
    store(stored, value);
    return load(stored);
}
template <>
inline vfloat rounded_to<float>(vfloat value) { return value; }
template <>
inline vfloat rounded_to<bf16>(vfloat value) {
    return reinterpret_cast<vfloat>(__builtin_convertvector(round_to_bf16(value), vuint) << 16);
}

// Lanes are added pairwise in one fixed order.
inline float sum_lanes(vfloat value) {
    value += __builtin_shufflevector(value, value, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    value += __builtin_shufflevector(value, value, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    value += __builtin_shufflevector(value, value, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return value[0] + value[1];
}

inline vfloat select(vint condition, vfloat yes, vfloat no) {
    return reinterpret_cast<vfloat>((reinterpret_cast<vint>(yes) & condition) | (reinterpret_cast<vint>(no) & ~condition));
}

inline float highest_lane(vfloat value) {
    vfloat other = __builtin_shufflevector(value, value, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    value = select(other > value, other, value);
    other = __builtin_shufflevector(value, value, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    value = select(other > value, other, value);
    other = __builtin_shufflevector(value, value, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    value = select(other > value, other, value);
    return value[0] > value[1] ? value[0] : value[1];
}

// e**x to about 1 ulp: 2**n times a polynomial on [-ln2/2, ln2/2] (Taylor's terms to the seventh power). Below -87 it is 0, and
// above 88 infinity.
inline vfloat exp_lanes(vfloat x) {
    const vfloat clamped = select(x < -88.0f, splat(-88.0f), select(x > 89.0f, splat(89.0f), x));
    const vfloat magic = splat(12582912.0f);  // 1.5 * 2**23: adding it rounds to an integer
    const vfloat shifted = clamped * 1.44269504088896341f + magic;
    const vfloat n = shifted - magic;
    const vfloat r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
    vfloat p = splat(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const vint exponent = __builtin_convertvector(n, vint);
    const vint half = exponent >> 1;  // in two factors, so that neither leaves the range of exponents
    const vfloat first = reinterpret_cast<vfloat>((half + 127) << 23);
    const vfloat second = reinterpret_cast<vfloat>((exponent - half + 127) << 23);
    const vfloat result = p * first * second;
    return select(x < -87.0f, splat(0.0f), select(x != x, x, result));
}

// The same for x of at most 0, or NaN: fewer steps.
inline vfloat exp_of_negative(vfloat x) {
    const vfloat clamped = select(x < -87.0f, splat(-87.0f), x);
    const vfloat magic = splat(12582912.0f);
    const vfloat shifted = clamped * 1.44269504088896341f + magic;
    const vfloat n = shifted - magic;
    const vfloat r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
    vfloat p = splat(1.0f / 720);
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    // The low bits of `shifted` are n: moved into the exponent, they scale p.
    const vint scaled = reinterpret_cast<vint>(p) + (reinterpret_cast<vint>(shifted) << 23);
    return select(x < -87.0f, splat(0.0f), reinterpret_cast<vfloat>(scaled));
}

}  // namespace kvrelay
