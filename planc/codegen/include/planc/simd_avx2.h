// The AVX2 + FMA backend of simd.h: sixteen lanes in two 256-bit registers.
#pragma once
#include <immintrin.h>

namespace planc {

struct Vec {
    __m256 lo, hi;
};
struct VecI {
    __m256i lo, hi;
};
struct Mask {
    __m256 lo, hi;
};

namespace detail {
// 16 ones then 16 zeros: a window of it is the mask of the first n lanes.
alignas(64) inline constexpr int32_t LANE_MASK[32] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
PLANC_INLINE __m256i lane_mask(int n, int half) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(LANE_MASK + 16 - n + 8 * half));
}
}  // namespace detail

PLANC_INLINE Vec splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
PLANC_INLINE Vec broadcast(const float* p) {
    __m256 x = _mm256_broadcast_ss(p);
    return {x, x};
}
PLANC_INLINE VecI splat_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }

PLANC_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
PLANC_INLINE void store(float* p, Vec x) {
    _mm256_storeu_ps(p, x.lo);
    _mm256_storeu_ps(p + 8, x.hi);
}
PLANC_INLINE Vec load(const float* p, int n) {
    return {_mm256_maskload_ps(p, detail::lane_mask(n, 0)), _mm256_maskload_ps(p + 8, detail::lane_mask(n, 1))};
}
PLANC_INLINE void store(float* p, Vec x, int n) {
    _mm256_maskstore_ps(p, detail::lane_mask(n, 0), x.lo);
    _mm256_maskstore_ps(p + 8, detail::lane_mask(n, 1), x.hi);
}
PLANC_INLINE VecI load_int(const void* p) {
    const __m256i* q = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}

PLANC_INLINE Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
PLANC_INLINE Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
PLANC_INLINE Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
PLANC_INLINE Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
PLANC_INLINE Vec fma(Vec a, Vec b, Vec c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
// a > b ? a : b, hence b when either is a NaN.
PLANC_INLINE Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
PLANC_INLINE Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
PLANC_INLINE Vec sqrt(Vec a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }

PLANC_INLINE VecI as_int(Vec a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
PLANC_INLINE Vec as_float(VecI a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
PLANC_INLINE VecI to_int(Vec a) { return {_mm256_cvttps_epi32(a.lo), _mm256_cvttps_epi32(a.hi)}; }
PLANC_INLINE Vec to_float(VecI a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }

PLANC_INLINE VecI operator+(VecI a, VecI b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
PLANC_INLINE VecI operator-(VecI a, VecI b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
PLANC_INLINE VecI operator&(VecI a, VecI b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
PLANC_INLINE VecI operator|(VecI a, VecI b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
template <int BITS>
PLANC_INLINE VecI shift_left(VecI a) {
    return {_mm256_slli_epi32(a.lo, BITS), _mm256_slli_epi32(a.hi, BITS)};
}
// Logical: zeros come in from the left.
template <int BITS>
PLANC_INLINE VecI shift_right(VecI a) {
    return {_mm256_srli_epi32(a.lo, BITS), _mm256_srli_epi32(a.hi, BITS)};
}

PLANC_INLINE Mask less(Vec a, Vec b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
PLANC_INLINE Mask equal(Vec a, Vec b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ)};
}
PLANC_INLINE Mask less(VecI a, VecI b) {
    return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(b.lo, a.lo)), _mm256_castsi256_ps(_mm256_cmpgt_epi32(b.hi, a.hi))};
}
PLANC_INLINE Mask is_nan(Vec a) {
    return {_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q)};
}
PLANC_INLINE Mask operator|(Mask a, Mask b) { return {_mm256_or_ps(a.lo, b.lo), _mm256_or_ps(a.hi, b.hi)}; }
PLANC_INLINE Vec select(Mask m, Vec yes, Vec no) {
    return {_mm256_blendv_ps(no.lo, yes.lo, m.lo), _mm256_blendv_ps(no.hi, yes.hi, m.hi)};
}
PLANC_INLINE VecI select(Mask m, VecI yes, VecI no) { return as_int(select(m, as_float(yes), as_float(no))); }

PLANC_INLINE VecI iota() { return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)}; }

// Byte BYTE of each lane moved to the top of the lane, the rest zero: the signed byte times 2^24.
template <int BYTE>
PLANC_INLINE VecI byte_at_top(VecI a) {
    if constexpr (BYTE == 0) return shift_left<24>(a);
    if constexpr (BYTE == 3) return a & splat_int(int32_t(0xff000000u));
    const __m256i pick = _mm256_set_epi8(12 + BYTE, -1, -1, -1, 8 + BYTE, -1, -1, -1, 4 + BYTE, -1, -1, -1, BYTE, -1, -1, -1,
                                         12 + BYTE, -1, -1, -1, 8 + BYTE, -1, -1, -1, 4 + BYTE, -1, -1, -1, BYTE, -1, -1, -1);
    return {_mm256_shuffle_epi8(a.lo, pick), _mm256_shuffle_epi8(a.hi, pick)};
}

PLANC_INLINE VecI widen_u16(const uint16_t* p) {
    const __m128i* q = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), _mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1))};
}
PLANC_INLINE VecI widen_i8(const int8_t* p) {
    const __m128i *lo = reinterpret_cast<const __m128i*>(p), *hi = reinterpret_cast<const __m128i*>(p + 8);
    return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(lo)), _mm256_cvtepi8_epi32(_mm_loadl_epi64(hi))};
}
// Sixteen codes of a sign, an exponent and MANTISSA bits (e4m3, e3m4) as halves, up to the difference of their biases: the
// sign, then exponent and mantissa, move to where a half has them. No code may be a NaN or an infinity.
template <int MANTISSA>
PLANC_INLINE Vec widen_f8(const uint8_t* p) {
    constexpr int UP = 10 - MANTISSA;
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, UP), _mm256_set1_epi16(int16_t(0x8000 | (0x7f << UP))));
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}
// The low 16 bits of each lane.
PLANC_INLINE void narrow_u16(uint16_t* p, VecI a) {
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(a.lo, a.hi), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
}

// Adds lane i and i+8, then i+4, i+2, i+1: the same order in every backend.
PLANC_INLINE float sum(Vec a) {
    __m256 x8 = _mm256_add_ps(a.lo, a.hi);
    __m128 x4 = _mm_add_ps(_mm256_castps256_ps128(x8), _mm256_extractf128_ps(x8, 1));
    __m128 x2 = _mm_add_ps(x4, _mm_movehl_ps(x4, x4));
    return _mm_cvtss_f32(_mm_add_ss(x2, _mm_movehdup_ps(x2)));
}
PLANC_INLINE float max(Vec a) {
    __m256 x8 = _mm256_max_ps(a.lo, a.hi);
    __m128 x4 = _mm_max_ps(_mm256_castps256_ps128(x8), _mm256_extractf128_ps(x8, 1));
    __m128 x2 = _mm_max_ps(x4, _mm_movehl_ps(x4, x4));
    return _mm_cvtss_f32(_mm_max_ss(x2, _mm_movehdup_ps(x2)));
}

PLANC_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
PLANC_INLINE void pause() { _mm_pause(); }

// Register tiles of the linear kernel, in vectors of 16: 16 registers hold six two-register accumulators and the operands.
constexpr int TILE_ACCUMULATORS = 6;
constexpr int PANEL_VECS = 1;

}  // namespace planc
