// Lanes of four bytes or two halves of 16 bits: what kernels over codes need beside simd.h.
#pragma once
#include "planc/simd.h"

namespace planc {

#if defined(__AVX512F__) && defined(__AVX512BW__) && !defined(PLANC_PORTABLE)

PLANC_INLINE void store_int(void* p, VecI a) { _mm512_storeu_si512(p, a.v); }
// The lowest byte of each lane.
PLANC_INLINE void narrow_u8(void* p, VecI a) {
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_maskz_cvtepi32_epi8(0xffff, a.v));
}

// Copies of the sign come in from the left.
template <int BITS>
PLANC_INLINE VecI shift_right_signed(VecI a) {
    return {_mm512_maskz_srai_epi32(0xffff, a.v, BITS)};
}
PLANC_INLINE VecI minus_bytes(VecI a, VecI b) { return {_mm512_sub_epi8(a.v, b.v)}; }

// Bytes 0 and 2 of each lane as signed halves; bytes 1 and 3.
PLANC_INLINE VecI even_bytes(VecI a) { return {_mm512_srai_epi16(_mm512_slli_epi16(a.v, 8), 8)}; }
PLANC_INLINE VecI odd_bytes(VecI a) { return {_mm512_srai_epi16(a.v, 8)}; }
// Of each eight bytes first those at even places, then the others.
PLANC_INLINE VecI bytes_in_turn(VecI a) {
    const __m512i turn = _mm512_maskz_broadcast_i32x4(0xffff, _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    return {_mm512_shuffle_epi8(a.v, turn)};
}

// sum + a.low * b.low + a.high * b.high over the signed halves of each lane.
PLANC_INLINE VecI dot_halves(VecI a, VecI b, VecI sum) {
#if defined(__AVX512VNNI__)
    return {_mm512_dpwssd_epi32(sum.v, a.v, b.v)};
#else
    sum = {_mm512_add_epi32(sum.v, _mm512_madd_epi16(a.v, b.v))};
    asm("" : "+v"(sum.v));  // gcc would add products first, and spill the sums
    return sum;
#endif
}

// table[code] for each byte, a code of 0..15.
PLANC_INLINE VecI look_up_bytes(const int8_t (&table)[16], VecI codes) {
    const __m512i wide = _mm512_maskz_broadcast_i32x4(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return {_mm512_shuffle_epi8(wide, codes.v)};
}

#elif defined(__AVX2__) && defined(__FMA__) && !defined(PLANC_PORTABLE)

PLANC_INLINE void store_int(void* p, VecI a) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), a.lo);
    _mm256_storeu_si256(static_cast<__m256i*>(p) + 1, a.hi);
}
namespace detail {
// The lowest byte of each lane.
PLANC_INLINE __m128i low_bytes(VecI a) {
    const __m256i low = _mm256_set1_epi32(0xff);
    const __m256i halves = _mm256_packus_epi32(_mm256_and_si256(a.lo, low), _mm256_and_si256(a.hi, low));
    const __m256i bytes = _mm256_packus_epi16(halves, halves);  // of lo and hi by turns, four lanes each
    const __m256i in_order = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5));
    return _mm256_castsi256_si128(in_order);
}
}  // namespace detail
PLANC_INLINE void narrow_u8(void* p, VecI a) { _mm_storeu_si128(static_cast<__m128i*>(p), detail::low_bytes(a)); }

// Copies of the sign come in from the left.
template <int BITS>
PLANC_INLINE VecI shift_right_signed(VecI a) {
    return {_mm256_srai_epi32(a.lo, BITS), _mm256_srai_epi32(a.hi, BITS)};
}
PLANC_INLINE VecI minus_bytes(VecI a, VecI b) { return {_mm256_sub_epi8(a.lo, b.lo), _mm256_sub_epi8(a.hi, b.hi)}; }

// Bytes 0 and 2 of each lane as signed halves; bytes 1 and 3.
PLANC_INLINE VecI even_bytes(VecI a) {
    return {_mm256_srai_epi16(_mm256_slli_epi16(a.lo, 8), 8), _mm256_srai_epi16(_mm256_slli_epi16(a.hi, 8), 8)};
}
PLANC_INLINE VecI odd_bytes(VecI a) { return {_mm256_srai_epi16(a.lo, 8), _mm256_srai_epi16(a.hi, 8)}; }
// Of each eight bytes first those at even places, then the others.
PLANC_INLINE VecI bytes_in_turn(VecI a) {
    const __m256i turn = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    return {_mm256_shuffle_epi8(a.lo, turn), _mm256_shuffle_epi8(a.hi, turn)};
}

// sum + a.low * b.low + a.high * b.high over the signed halves of each lane.
PLANC_INLINE VecI dot_halves(VecI a, VecI b, VecI sum) {
    sum = {_mm256_add_epi32(sum.lo, _mm256_madd_epi16(a.lo, b.lo)), _mm256_add_epi32(sum.hi, _mm256_madd_epi16(a.hi, b.hi))};
    asm("" : "+x"(sum.lo), "+x"(sum.hi));  // gcc would add products first, and spill the sums
    return sum;
}

// table[code] for each byte, a code of 0..15.
PLANC_INLINE VecI look_up_bytes(const int8_t (&table)[16], VecI codes) {
    const __m256i wide = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return {_mm256_shuffle_epi8(wide, codes.lo), _mm256_shuffle_epi8(wide, codes.hi)};
}

#else

typedef uint8_t UBytes __attribute__((vector_size(16)));

PLANC_INLINE void store_int(void* p, VecI a) { PLANC_EACH(i) std::memcpy(static_cast<char*>(p) + 16 * i, &a.v[i], 16); }
// The lowest byte of each lane.
PLANC_INLINE void narrow_u8(void* p, VecI a) {
    int32_t lanes[LANES];
    store_int(lanes, a);
    for (int i = 0; i < LANES; ++i) static_cast<uint8_t*>(p)[i] = uint8_t(lanes[i]);
}

// Copies of the sign come in from the left.
template <int BITS>
PLANC_INLINE VecI shift_right_signed(VecI a) {
    PLANC_EACH(i) a.v[i] = a.v[i] >> BITS;
    return a;
}
PLANC_INLINE VecI minus_bytes(VecI a, VecI b) {
    PLANC_EACH(i) a.v[i] = (Int4)((UBytes)a.v[i] - (UBytes)b.v[i]);
    return a;
}

typedef int16_t Halves __attribute__((vector_size(16)));
// Bytes 0 and 2 of each lane as signed halves; bytes 1 and 3.
PLANC_INLINE VecI even_bytes(VecI a) {
    PLANC_EACH(i) a.v[i] = (Int4)((Halves)((UInt4)a.v[i] << 8) >> 8);
    return a;
}
PLANC_INLINE VecI odd_bytes(VecI a) {
    PLANC_EACH(i) a.v[i] = (Int4)((Halves)a.v[i] >> 8);
    return a;
}
// Of each eight bytes first those at even places, then the others.
PLANC_INLINE VecI bytes_in_turn(VecI a) {
    int8_t bytes[4 * LANES], turned[4 * LANES];
    store_int(bytes, a);
    for (int i = 0; i < 4 * LANES; ++i) turned[i] = bytes[i / 8 * 8 + i % 4 * 2 + i % 8 / 4];
    return load_int(turned);
}

// sum + a.low * b.low + a.high * b.high over the signed halves of each lane.
PLANC_INLINE VecI dot_halves(VecI a, VecI b, VecI sum) {
    PLANC_EACH(i) {
        const Int4 low = (Int4)((UInt4)a.v[i] << 16) >> 16, other = (Int4)((UInt4)b.v[i] << 16) >> 16;
        sum.v[i] = sum.v[i] + low * other + (a.v[i] >> 16) * (b.v[i] >> 16);
    }
    return sum;
}

// table[code] for each byte, a code of 0..15.
PLANC_INLINE VecI look_up_bytes(const int8_t (&table)[16], VecI codes) {
    int8_t bytes[4 * LANES];
    store_int(bytes, codes);
    for (int8_t& byte : bytes) byte = table[byte];
    return load_int(bytes);
}

#endif

}  // namespace planc
