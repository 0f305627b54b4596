// Instructions that multiply pairs of bf16 or quads of bytes and add, where the target has them (+bf16; +vnni, +avxvnni).
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
// Two rows of sixteen bf16 side by side: lane i holds first[i] (low half) and second[i].
PLANC_INLINE VecI bf16_zip(const uint16_t* first, const uint16_t* second) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                           23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    if (second == first + LANES) return {_mm512_permutexvar_epi16(order, _mm512_loadu_si512(first))};
    const auto half = [](const uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); };
    const __m512i both = _mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(half(first)), half(second), 1);
    return {_mm512_permutexvar_epi16(order, both)};
}

#else

constexpr bool BF16_DOTS = false;
PLANC_INLINE Vec dot_bf16(VecI, VecI, Vec sum) { return sum; }
PLANC_INLINE VecI bf16_pairs(Vec first, Vec) { return as_int(first); }
PLANC_INLINE VecI bf16_zip(const uint16_t*, const uint16_t*) { return splat_int(0); }

#endif

#if defined(__AVX512VNNI__) && !defined(PLANC_PORTABLE)

constexpr bool BYTE_DOTS = true;
constexpr int DIGIT_ACCUMULATORS = 8, BYTE_TILE_ROWS = 4;  // gcc 12 spills sums of more
PLANC_INLINE Vec held(Vec sum) { return sum; }

// sum + the products of the four unsigned bytes of a and the four signed ones of b, i32 in each lane. (In assembly, as gcc
// spills the sums of its intrinsic: they change their type at each call.)
PLANC_INLINE Vec dot_bytes(VecI a, VecI b, Vec sum) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(a.v), "v"(b.v));
    return sum;
}
// The lowest byte of each lane: of each eight first those at even places, then the others.
PLANC_INLINE void narrow_u8_in_turn(void* p, VecI a) {
    const __m128i turn = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm_shuffle_epi8(_mm512_maskz_cvtepi32_epi8(0xffff, a.v), turn));
}

#elif defined(__AVXVNNI__) && !defined(__AVX512F__) && !defined(PLANC_PORTABLE)

constexpr bool BYTE_DOTS = true;
// Sums take 12 of 16 registers; a line and what it multiplies, three.
constexpr int DIGIT_ACCUMULATORS = 3, BYTE_TILE_ROWS = 6;

// As AVX-VNNI encodes it; for tests on CPUs that lack that, as AVX512-VNNI does, with the same operands.
#if defined(PLANC_EVEX_DOTS)
#define PLANC_DOT_BYTES "%{evex%} vpdpbusd"
#else
#define PLANC_DOT_BYTES "%{vex%} vpdpbusd"
#endif

PLANC_INLINE Vec dot_bytes(VecI a, VecI b, Vec sum) {
    asm(PLANC_DOT_BYTES " %2, %1, %0" : "+x"(sum.lo) : "x"(a.lo), "x"(b.lo));
    asm(PLANC_DOT_BYTES " %2, %1, %0" : "+x"(sum.hi) : "x"(a.hi), "x"(b.hi));
    return sum;
}
#undef PLANC_DOT_BYTES
// A sum before and behind the loop that adds to it: gcc 12 spills those that are integers on one side of an end.
PLANC_INLINE Vec held(Vec sum) {
    asm("" : "+x"(sum.lo), "+x"(sum.hi));
    return sum;
}

PLANC_INLINE void narrow_u8_in_turn(void* p, VecI a) {
    const __m128i turn = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm_shuffle_epi8(detail::low_bytes(a), turn));
}

#else

constexpr bool BYTE_DOTS = false;
constexpr int DIGIT_ACCUMULATORS = 1, BYTE_TILE_ROWS = 1;
PLANC_INLINE Vec held(Vec sum) { return sum; }
PLANC_INLINE Vec dot_bytes(VecI, VecI, Vec sum) { return sum; }
PLANC_INLINE void narrow_u8_in_turn(void*, VecI) {}

#endif

PLANC_INLINE int32_t sum_of_lanes(VecI a) {
    int32_t lanes[LANES], sum = 0;
    store_int(lanes, a);
    for (int32_t lane : lanes) sum += lane;
    return sum;
}

}  // namespace planc
