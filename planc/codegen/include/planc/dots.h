// Instructions that multiply pairs of bf16 or quads of bytes and add, where the target has them (+bf16, +vnni).
//
// A kernel asks BF16_DOTS or BYTE_DOTS and has another way where it is false; the functions are then only compiled.
#pragma once
#include "planc/bytes.h"

namespace planc {

#if defined(__AVX512BF16__) && !defined(PLANC_PORTABLE)

constexpr bool BF16_DOTS = true;

// sum + a.high * b.high + a.low * b.low over the two bf16 of each lane. Numbers below the normal ones count as zero.
PLANC_INLINE Vec dot_bf16(VecI a, VecI b, Vec sum) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)a.v, (__m512bh)b.v)};
}
// Thirty-two floats in a row, rounded to nearest even: lane i holds elements 2i (low half) and 2i + 1.
PLANC_INLINE VecI bf16_pairs(Vec first, Vec second) {
    return {(__m512i)_mm512_cvtne2ps_pbh(second.v, first.v)};
}

#else

constexpr bool BF16_DOTS = false;
PLANC_INLINE Vec dot_bf16(VecI, VecI, Vec sum) { return sum; }
PLANC_INLINE VecI bf16_pairs(Vec first, Vec) { return as_int(first); }

#endif

#if defined(__AVX512VNNI__) && !defined(PLANC_PORTABLE)

constexpr bool BYTE_DOTS = true;

// sum + the products of the four unsigned bytes of a and the four signed ones of b, i32 in each lane. (In assembly, as gcc
// spills the sums of its intrinsic: they change their type at each call.)
PLANC_INLINE Vec dot_bytes(VecI a, VecI b, Vec sum) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(a.v), "v"(b.v));
    return sum;
}
PLANC_INLINE int32_t sum_of_lanes(VecI a) {
    int32_t lanes[LANES], sum = 0;
    store_int(lanes, a);
    for (int32_t lane : lanes) sum += lane;
    return sum;
}
// The lowest byte of each lane; IN_TURN, of each eight first those at even places, then the others.
template <bool IN_TURN>
PLANC_INLINE void store_lowest_bytes(void* p, VecI a) {
    __m128i bytes = _mm512_maskz_cvtepi32_epi8(0xffff, a.v);
    if (IN_TURN) bytes = _mm_shuffle_epi8(bytes, _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    _mm_storeu_si128(static_cast<__m128i*>(p), bytes);
}

#else

constexpr bool BYTE_DOTS = false;
PLANC_INLINE Vec dot_bytes(VecI, VecI, Vec sum) { return sum; }
PLANC_INLINE int32_t sum_of_lanes(VecI) { return 0; }
template <bool>
PLANC_INLINE void store_lowest_bytes(void*, VecI) {}

#endif

}  // namespace planc
