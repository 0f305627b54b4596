// The portable backend of simd.h: sixteen lanes as four 16-byte vectors of the compiler's own vector extension.
#pragma once
#include <cmath>

namespace planc {

typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));
typedef uint32_t UInt4 __attribute__((vector_size(16)));

struct Vec {
    Float4 v[4];
};
struct VecI {
    Int4 v[4];
};
struct Mask {
    Int4 v[4];
};

#define PLANC_EACH(i) PLANC_UNROLL for (int i = 0; i < 4; ++i)

PLANC_INLINE Vec splat(float x) {
    Float4 q = {x, x, x, x};
    return {{q, q, q, q}};
}
PLANC_INLINE Vec broadcast(const float* p) { return splat(*p); }
PLANC_INLINE VecI splat_int(int32_t x) {
    Int4 q = {x, x, x, x};
    return {{q, q, q, q}};
}

PLANC_INLINE Vec load(const float* p) {
    Vec r;
    PLANC_EACH(i) std::memcpy(&r.v[i], p + 4 * i, 16);
    return r;
}
PLANC_INLINE void store(float* p, Vec x) { PLANC_EACH(i) std::memcpy(p + 4 * i, &x.v[i], 16); }
PLANC_INLINE Vec load(const float* p, int n) {
    float padded[LANES] = {};
    std::memcpy(padded, p, size_t(n) * 4);
    return load(padded);
}
PLANC_INLINE void store(float* p, Vec x, int n) {
    float full[LANES];
    store(full, x);
    std::memcpy(p, full, size_t(n) * 4);
}
PLANC_INLINE VecI load_int(const void* p) {
    VecI r;
    PLANC_EACH(i) std::memcpy(&r.v[i], static_cast<const char*>(p) + 16 * i, 16);
    return r;
}

#define PLANC_BINARY(type, name, expression)        \
    PLANC_INLINE type name(type a, type b) {        \
        type r;                                     \
        PLANC_EACH(i) r.v[i] = expression;          \
        return r;                                   \
    }
PLANC_BINARY(Vec, operator+, a.v[i] + b.v[i])
PLANC_BINARY(Vec, operator-, a.v[i] - b.v[i])
PLANC_BINARY(Vec, operator*, a.v[i] * b.v[i])
PLANC_BINARY(Vec, operator/, a.v[i] / b.v[i])
// a > b ? a : b, hence b when either is a NaN.
PLANC_BINARY(Vec, max, a.v[i] > b.v[i] ? a.v[i] : b.v[i])
PLANC_BINARY(Vec, min, a.v[i] < b.v[i] ? a.v[i] : b.v[i])
PLANC_BINARY(VecI, operator+, (Int4)((UInt4)a.v[i] + (UInt4)b.v[i]))
PLANC_BINARY(VecI, operator-, (Int4)((UInt4)a.v[i] - (UInt4)b.v[i]))
PLANC_BINARY(VecI, operator&, a.v[i] & b.v[i])
PLANC_BINARY(VecI, operator|, a.v[i] | b.v[i])
PLANC_BINARY(Mask, operator|, a.v[i] | b.v[i])
#undef PLANC_BINARY

// Two roundings: the baseline has no fused multiply-add, and a library call a lane would cost a hundred times as much.
PLANC_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }

PLANC_INLINE Vec sqrt(Vec a) {
    Vec r;
    PLANC_EACH(i) for (int k = 0; k < 4; ++k) r.v[i][k] = std::sqrt(a.v[i][k]);
    return r;
}

#define PLANC_UNARY(result, name, argument, expression) \
    PLANC_INLINE result name(argument a) {              \
        result r;                                       \
        PLANC_EACH(i) r.v[i] = expression;              \
        return r;                                       \
    }
PLANC_UNARY(VecI, as_int, Vec, (Int4)a.v[i])
PLANC_UNARY(Vec, as_float, VecI, (Float4)a.v[i])
PLANC_UNARY(VecI, to_int, Vec, __builtin_convertvector(a.v[i], Int4))
PLANC_UNARY(Vec, to_float, VecI, __builtin_convertvector(a.v[i], Float4))
PLANC_UNARY(Mask, is_nan, Vec, a.v[i] != a.v[i])
#undef PLANC_UNARY

template <int BITS>
PLANC_INLINE VecI shift_left(VecI a) {
    PLANC_EACH(i) a.v[i] = (Int4)((UInt4)a.v[i] << BITS);
    return a;
}
// Logical: zeros come in from the left.
template <int BITS>
PLANC_INLINE VecI shift_right(VecI a) {
    PLANC_EACH(i) a.v[i] = (Int4)((UInt4)a.v[i] >> BITS);
    return a;
}

PLANC_INLINE Mask less(Vec a, Vec b) {
    Mask r;
    PLANC_EACH(i) r.v[i] = a.v[i] < b.v[i];
    return r;
}
PLANC_INLINE Mask equal(Vec a, Vec b) {
    Mask r;
    PLANC_EACH(i) r.v[i] = a.v[i] == b.v[i];
    return r;
}
PLANC_INLINE Mask less(VecI a, VecI b) {
    Mask r;
    PLANC_EACH(i) r.v[i] = a.v[i] < b.v[i];
    return r;
}
PLANC_INLINE VecI select(Mask m, VecI yes, VecI no) {
    VecI r;
    PLANC_EACH(i) r.v[i] = (m.v[i] & yes.v[i]) | (~m.v[i] & no.v[i]);
    return r;
}
PLANC_INLINE Vec select(Mask m, Vec yes, Vec no) { return as_float(select(m, as_int(yes), as_int(no))); }

PLANC_INLINE VecI iota() {
    return {{Int4{0, 1, 2, 3}, Int4{4, 5, 6, 7}, Int4{8, 9, 10, 11}, Int4{12, 13, 14, 15}}};
}

// Byte BYTE of each lane moved to the top of the lane, the rest zero: the signed byte times 2^24.
template <int BYTE>
PLANC_INLINE VecI byte_at_top(VecI a) {
    return shift_left<24 - 8 * BYTE>(a) & splat_int(int32_t(0xff000000u));
}

PLANC_INLINE VecI widen_u16(const uint16_t* p) {
    VecI r;
    PLANC_EACH(i) for (int k = 0; k < 4; ++k) r.v[i][k] = p[4 * i + k];
    return r;
}
PLANC_INLINE VecI widen_i8(const int8_t* p) {
    VecI r;
    PLANC_EACH(i) for (int k = 0; k < 4; ++k) r.v[i][k] = p[4 * i + k];
    return r;
}
// Sixteen codes of a sign, an exponent and MANTISSA bits (e4m3, e3m4) as halves, up to the difference of their biases. The
// smallest have no hidden bit. No code may be a NaN or an infinity.
template <int MANTISSA>
PLANC_INLINE Vec widen_f8(const uint8_t* p) {
    VecI code;
    PLANC_EACH(i) for (int k = 0; k < 4; ++k) code.v[i][k] = p[4 * i + k];
    const VecI magnitude = code & splat_int(0x7f);
    const Vec tiny = to_float(magnitude) * splat(0x1p-14f / float(1 << MANTISSA));
    const Vec normal = as_float(shift_left<23 - MANTISSA>(magnitude) + splat_int(112 << 23));
    const Vec value = select(less(magnitude, splat_int(1 << MANTISSA)), tiny, normal);
    return as_float(as_int(value) | shift_left<24>(code & splat_int(0x80)));
}
// The low 16 bits of each lane.
PLANC_INLINE void narrow_u16(uint16_t* p, VecI a) {
    PLANC_EACH(i) for (int k = 0; k < 4; ++k) p[4 * i + k] = uint16_t(a.v[i][k]);
}

// Adds lane i and i+8, then i+4, i+2, i+1: the same order in every backend.
PLANC_INLINE float sum(Vec a) {
    Float4 x = (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]);
    return (x[0] + x[2]) + (x[1] + x[3]);
}
PLANC_INLINE float max(Vec a) {
    Vec b = max(Vec{{a.v[0], a.v[1], a.v[0], a.v[1]}}, Vec{{a.v[2], a.v[3], a.v[2], a.v[3]}});
    float m = b.v[0][0];
    for (int k = 0; k < 8; ++k) m = b.v[k / 4][k % 4] > m ? b.v[k / 4][k % 4] : m;
    return m;
}

PLANC_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
PLANC_INLINE void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

// Register tiles of the linear kernel, in vectors of 16: 16 registers of four lanes, 32 on 64-bit Arm.
#if defined(__aarch64__)
constexpr int TILE_ACCUMULATORS = 6;
#else
constexpr int TILE_ACCUMULATORS = 2;
#endif
constexpr int PANEL_VECS = 1;

}  // namespace planc
