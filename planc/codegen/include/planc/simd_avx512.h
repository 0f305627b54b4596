// The AVX-512 backend of simd.h: sixteen lanes in one 512-bit register.
#pragma once
#include <immintrin.h>

namespace planc {

struct Vec {
    __m512 v;
};
struct VecI {
    __m512i v;
};
struct Mask {
    __mmask16 m;
};

namespace detail {
PLANC_INLINE __mmask16 lane_mask(int n) { return __mmask16((1u << n) - 1u); }
}  // namespace detail

PLANC_INLINE Vec splat(float x) { return {_mm512_set1_ps(x)}; }
PLANC_INLINE Vec broadcast(const float* p) { return {_mm512_set1_ps(*p)}; }
PLANC_INLINE VecI splat_int(int32_t x) { return {_mm512_set1_epi32(x)}; }

PLANC_INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
PLANC_INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x.v); }
PLANC_INLINE Vec load(const float* p, int n) { return {_mm512_maskz_loadu_ps(detail::lane_mask(n), p)}; }
PLANC_INLINE void store(float* p, Vec x, int n) { _mm512_mask_storeu_ps(p, detail::lane_mask(n), x.v); }
PLANC_INLINE VecI load_int(const void* p) { return {_mm512_loadu_si512(p)}; }

PLANC_INLINE Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
PLANC_INLINE Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
PLANC_INLINE Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
PLANC_INLINE Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
PLANC_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// a > b ? a : b, hence b when either is a NaN. (The masked forms avoid a false "uninitialised" of g++ 12.)
PLANC_INLINE Vec max(Vec a, Vec b) { return {_mm512_maskz_max_ps(0xffff, a.v, b.v)}; }
PLANC_INLINE Vec min(Vec a, Vec b) { return {_mm512_maskz_min_ps(0xffff, a.v, b.v)}; }
PLANC_INLINE Vec sqrt(Vec a) { return {_mm512_maskz_sqrt_ps(0xffff, a.v)}; }

PLANC_INLINE VecI as_int(Vec a) { return {_mm512_castps_si512(a.v)}; }
PLANC_INLINE Vec as_float(VecI a) { return {_mm512_castsi512_ps(a.v)}; }
PLANC_INLINE VecI to_int(Vec a) { return {_mm512_maskz_cvttps_epi32(0xffff, a.v)}; }
PLANC_INLINE Vec to_float(VecI a) { return {_mm512_maskz_cvtepi32_ps(0xffff, a.v)}; }

PLANC_INLINE VecI operator+(VecI a, VecI b) { return {_mm512_add_epi32(a.v, b.v)}; }
PLANC_INLINE VecI operator-(VecI a, VecI b) { return {_mm512_sub_epi32(a.v, b.v)}; }
PLANC_INLINE VecI operator&(VecI a, VecI b) { return {_mm512_and_si512(a.v, b.v)}; }
PLANC_INLINE VecI operator|(VecI a, VecI b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int BITS>
PLANC_INLINE VecI shift_left(VecI a) {
    return {_mm512_maskz_slli_epi32(0xffff, a.v, BITS)};
}
// Logical: zeros come in from the left.
template <int BITS>
PLANC_INLINE VecI shift_right(VecI a) {
    return {_mm512_maskz_srli_epi32(0xffff, a.v, BITS)};
}

PLANC_INLINE Mask less(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
PLANC_INLINE Mask equal(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
PLANC_INLINE Mask less(VecI a, VecI b) { return {_mm512_cmplt_epi32_mask(a.v, b.v)}; }
PLANC_INLINE Mask is_nan(Vec a) { return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)}; }
PLANC_INLINE Mask operator|(Mask a, Mask b) { return {__mmask16(a.m | b.m)}; }
PLANC_INLINE Vec select(Mask m, Vec yes, Vec no) { return {_mm512_mask_blend_ps(m.m, no.v, yes.v)}; }
PLANC_INLINE VecI select(Mask m, VecI yes, VecI no) { return {_mm512_mask_blend_epi32(m.m, no.v, yes.v)}; }

PLANC_INLINE VecI iota() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }

// Byte BYTE of each lane moved to the top of the lane, the rest zero: the signed byte times 2^24.
template <int BYTE>
PLANC_INLINE VecI byte_at_top(VecI a) {
    if constexpr (BYTE == 3) return a & splat_int(int32_t(0xff000000u));
    if constexpr (BYTE == 0) return shift_left<24>(a);
    return shift_left<24 - 8 * BYTE>(a) & splat_int(int32_t(0xff000000u));
}

PLANC_INLINE VecI widen_u16(const uint16_t* p) {
    return {_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
PLANC_INLINE VecI widen_i8(const int8_t* p) {
    return {_mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
// Sixteen codes of a sign, an exponent and MANTISSA bits (e4m3, e3m4) as halves, up to the difference of their biases: the
// sign, then exponent and mantissa, move to where a half has them. No code may be a NaN or an infinity.
template <int MANTISSA>
PLANC_INLINE Vec widen_f8(const uint8_t* p) {
    constexpr int UP = 10 - MANTISSA;
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, UP), _mm256_set1_epi16(int16_t(0x8000 | (0x7f << UP))));
    return {_mm512_maskz_cvtph_ps(0xffff, halves)};
}
// The low 16 bits of each lane.
PLANC_INLINE void narrow_u16(uint16_t* p, VecI a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtepi32_epi16(0xffff, a.v));
}

namespace detail {
template <int HALF>
PLANC_INLINE __m256 half(Vec a) {
    return _mm256_castpd_ps(_mm512_maskz_extractf64x4_pd(0xf, _mm512_castps_pd(a.v), HALF));
}
}  // namespace detail

// Adds lane i and i+8, then i+4, i+2, i+1: the same order in every backend.
PLANC_INLINE float sum(Vec a) {
    __m256 x8 = _mm256_add_ps(detail::half<0>(a), detail::half<1>(a));
    __m128 x4 = _mm_add_ps(_mm256_castps256_ps128(x8), _mm256_extractf128_ps(x8, 1));
    __m128 x2 = _mm_add_ps(x4, _mm_movehl_ps(x4, x4));
    return _mm_cvtss_f32(_mm_add_ss(x2, _mm_movehdup_ps(x2)));
}
PLANC_INLINE float max(Vec a) {
    __m256 x8 = _mm256_max_ps(detail::half<0>(a), detail::half<1>(a));
    __m128 x4 = _mm_max_ps(_mm256_castps256_ps128(x8), _mm256_extractf128_ps(x8, 1));
    __m128 x2 = _mm_max_ps(x4, _mm_movehl_ps(x4, x4));
    return _mm_cvtss_f32(_mm_max_ss(x2, _mm_movehdup_ps(x2)));
}

PLANC_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
PLANC_INLINE void pause() { _mm_pause(); }

// Register tiles of the linear kernel, in vectors of 16: 24 of the 32 registers accumulate.
constexpr int TILE_ACCUMULATORS = 24;
constexpr int PANEL_VECS = 4;

}  // namespace planc
