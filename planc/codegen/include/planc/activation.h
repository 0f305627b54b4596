// Elementwise operations as types with one static apply: unary, binary, with a constant on one side, and gated.
#pragma once
#include <cmath>

#include "planc/vecmath.h"

namespace planc {

namespace detail {
// For functions that no hot path uses: the C library's, a lane at a time.
template <class F>
PLANC_INLINE Vec each_lane(Vec x, F f) {
    float lanes[LANES];
    store(lanes, x);
    for (float& lane : lanes) lane = f(lane);
    return load(lanes);
}
}  // namespace detail

#define PLANC_UNARY_OP(name, expression)                               \
    struct name {                                                      \
        static PLANC_INLINE Vec apply(Vec x) { return expression; }    \
    };
PLANC_UNARY_OP(Copy, x)
PLANC_UNARY_OP(Neg, negate(x))
PLANC_UNARY_OP(Abs, abs(x))
PLANC_UNARY_OP(Exp, exp(x))
PLANC_UNARY_OP(Log, detail::each_lane(x, [](float v) { return std::log(v); }))
PLANC_UNARY_OP(Sqrt, sqrt(x))
PLANC_UNARY_OP(Rsqrt, splat(1.0f) / sqrt(x))
PLANC_UNARY_OP(Reciprocal, splat(1.0f) / x)
PLANC_UNARY_OP(Square, x* x)
PLANC_UNARY_OP(Cos, detail::each_lane(x, [](float v) { return std::cos(v); }))
PLANC_UNARY_OP(Sin, detail::each_lane(x, [](float v) { return std::sin(v); }))
PLANC_UNARY_OP(Tanh, tanh(x))
PLANC_UNARY_OP(Erf, erf(x))
PLANC_UNARY_OP(Sigmoid, sigmoid(x))
PLANC_UNARY_OP(Silu, x* sigmoid(x))
// max gives its second operand when either is a NaN, so these keep one.
PLANC_UNARY_OP(Relu, max(zero(), x))
PLANC_UNARY_OP(Relu2, max(zero(), x) * max(zero(), x))
PLANC_UNARY_OP(Softplus, detail::each_lane(x, [](float v) { return std::fmax(v, 0.0f) + std::log1p(std::exp(-std::fabs(v))); }))
PLANC_UNARY_OP(Floor, detail::each_lane(x, [](float v) { return std::floor(v); }))
PLANC_UNARY_OP(Gelu, x* splat(0.5f) * (splat(1.0f) + erf(x * splat(0.70710678f))))
// sqrt(2 / pi) * (x + 0.044715 x^3) inside the tanh.
PLANC_UNARY_OP(GeluTanh, x* splat(0.5f) * (splat(1.0f) + tanh(splat(0.7978845608f) * fma(x * x * x, splat(0.044715f), x))))
#undef PLANC_UNARY_OP

#define PLANC_BINARY_OP(name, expression, scalar)                                       \
    struct name {                                                                       \
        static PLANC_INLINE Vec apply(Vec a, Vec b) { return expression; }              \
        static PLANC_INLINE int32_t apply(int32_t a, int32_t b) { return scalar; }      \
    };
PLANC_BINARY_OP(Add, a + b, a + b)
PLANC_BINARY_OP(Sub, a - b, a - b)
PLANC_BINARY_OP(Mul, a* b, a* b)
PLANC_BINARY_OP(Maximum, select(is_nan(a), a, max(a, b)), a > b ? a : b)
PLANC_BINARY_OP(Minimum, select(is_nan(a), a, min(a, b)), a < b ? a : b)
#undef PLANC_BINARY_OP

struct Div {
    static PLANC_INLINE Vec apply(Vec a, Vec b) { return a / b; }
};

struct Pow {
    static PLANC_INLINE Vec apply(Vec a, Vec b) {
        float base[LANES], exponent[LANES];
        store(base, a);
        store(exponent, b);
        for (int i = 0; i < LANES; ++i) base[i] = std::pow(base[i], exponent[i]);
        return load(base);
    }
};

// x^N for a small positive whole N.
template <int N>
struct PowInt {
    static PLANC_INLINE Vec apply(Vec x) {
        Vec y = x;
        PLANC_UNROLL for (int i = 1; i < N; ++i) y = y * x;
        return y;
    }
};

struct Cast {
    template <class T>
    static PLANC_INLINE T apply(T x) {
        return x;
    }
};

// Op with a constant as its second operand (first if REVERSED); Constant has a static VALUE.
template <class Op, class Constant, bool REVERSED>
struct WithConstant {
    static PLANC_INLINE Vec apply(Vec x) {
        const Vec c = splat(float(Constant::VALUE));
        return REVERSED ? Op::apply(c, x) : Op::apply(x, c);
    }
    static PLANC_INLINE int32_t apply(int32_t x) {
        const int32_t c = int32_t(Constant::VALUE);
        return REVERSED ? Op::apply(c, x) : Op::apply(x, c);
    }
};

// act(gate) * up.
template <class Act>
struct Gated {
    static PLANC_INLINE Vec apply(Vec gate, Vec up) { return Act::apply(gate) * up; }
};

}  // namespace planc
