// Sixteen float lanes on any machine: one thin vector type, its backend picked from the compiler's target macros.
//
// The width is 16 for every backend, so x86-64-v3 and x86-64-v4 add in the same order and give the same bits. The portable
// backend multiplies and adds separately (no fused multiply-add on the baseline), hence its bits are its own, but they are
// the same on every machine.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#define PLANC_INLINE inline __attribute__((always_inline))
// After a lambda's parameters: the compiler's inlining budget must not decide whether accumulators stay in registers.
#define PLANC_INLINED __attribute__((always_inline))
#if defined(__clang__)
#define PLANC_UNROLL _Pragma("clang loop unroll(full)")
#else
#define PLANC_UNROLL _Pragma("GCC unroll 64")
#endif

namespace planc {
constexpr int LANES = 16;
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && !defined(PLANC_PORTABLE)
#include "planc/simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && !defined(PLANC_PORTABLE)
#include "planc/simd_avx2.h"
#else
#include "planc/simd_portable.h"
#endif

namespace planc {

// For memory in scattered pieces: the second-level cache waits for more lines at a time than the first does.
PLANC_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

PLANC_INLINE Vec zero() { return splat(0.0f); }

// A 32-bit lane of a "k2" line holds column c's k (low half) and k+1 (high half) in bf16; each widens to f32 exactly.
PLANC_INLINE Vec bf16_low(VecI pair) { return as_float(shift_left<16>(pair)); }
PLANC_INLINE Vec bf16_high(VecI pair) { return as_float(pair & splat_int(int32_t(0xffff0000u))); }

// f32 bits to bf16 bits (in the low half of each lane), round to nearest even; a NaN stays a NaN.
PLANC_INLINE VecI bf16_bits(Vec x) {
    VecI bits = as_int(x);
    VecI odd = shift_right<16>(bits) & splat_int(1);
    VecI rounded = shift_right<16>(bits + splat_int(0x7fff) + odd);
    VecI quiet = shift_right<16>(bits) | splat_int(0x40);
    return select(is_nan(x), quiet, rounded);
}

PLANC_INLINE float bf16_to_float(uint16_t bits) {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

PLANC_INLINE uint16_t float_to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40u);
    return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// One interface over the element types that activations, weights and the KV cache are stored in.
PLANC_INLINE Vec load_as_float(const float* p) { return load(p); }
PLANC_INLINE Vec load_as_float(const float* p, int n) { return load(p, n); }
PLANC_INLINE Vec load_as_float(const uint16_t* p) { return as_float(shift_left<16>(widen_u16(p))); }
PLANC_INLINE Vec load_as_float(const int8_t* p) { return to_float(widen_i8(p)); }

PLANC_INLINE Vec load_as_float(const uint16_t* p, int n) {
    uint16_t padded[LANES] = {};
    std::memcpy(padded, p, size_t(n) * 2);
    return load_as_float(padded);
}

PLANC_INLINE Vec load_as_float(const int8_t* p, int n) {
    int8_t padded[LANES] = {};
    std::memcpy(padded, p, size_t(n));
    return load_as_float(padded);
}

PLANC_INLINE float element_to_float(float value) { return value; }
PLANC_INLINE float element_to_float(uint16_t value) { return bf16_to_float(value); }
PLANC_INLINE float element_to_float(int8_t value) { return float(value); }
PLANC_INLINE void float_to_element(float value, float* out) { *out = value; }
PLANC_INLINE void float_to_element(float value, uint16_t* out) { *out = float_to_bf16(value); }

PLANC_INLINE void store_from_float(float* p, Vec x) { store(p, x); }
PLANC_INLINE void store_from_float(float* p, Vec x, int n) { store(p, x, n); }
PLANC_INLINE void store_from_float(uint16_t* p, Vec x) { narrow_u16(p, bf16_bits(x)); }

PLANC_INLINE void store_from_float(uint16_t* p, Vec x, int n) {
    uint16_t full[LANES];
    store_from_float(full, x);
    std::memcpy(p, full, size_t(n) * 2);
}

// The first n <= 16 lanes; the whole vector is the fast path.
PLANC_INLINE Vec load_lanes(const float* p, int n) { return n == LANES ? load(p) : load(p, n); }
PLANC_INLINE void store_lanes(float* p, Vec x, int n) {
    if (n == LANES) {
        store(p, x);
    } else {
        store(p, x, n);
    }
}

// Calls body(offset, lanes) over 0..length in steps of 16: the last call may have fewer lanes.
template <class Body>
PLANC_INLINE void for_each_vec(int length, Body body) {
    int i = 0;
    for (; i + LANES <= length; i += LANES) body(i, LANES);
    if (i < length) body(i, length - i);
}

}  // namespace planc
