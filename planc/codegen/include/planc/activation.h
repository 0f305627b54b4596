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
template <class F>
PLANC_INLINE Vec each_pair(Vec a, Vec b, F f) {
    float x[LANES], y[LANES];
    store(x, a);
    store(y, b);
    for (int i = 0; i < LANES; ++i) x[i] = f(x[i], y[i]);
    return load(x);
}

PLANC_INLINE Vec truth(Mask m) { return select(m, splat(1.0f), zero()); }

inline float remainder(float a, float b) {
    const float r = std::fmod(a, b);
    if (r == 0.0f) return std::copysign(0.0f, b);
    return (r < 0.0f) != (b < 0.0f) ? r + b : r;
}
// The quotient of what the remainder leaves, so that rounding never gives the whole number above.
inline float floor_divide(float a, float b) {
    if (b == 0.0f) return a / b;
    const float r = std::fmod(a, b);
    float q = (a - r) / b;
    if (r != 0.0f && (r < 0.0f) != (b < 0.0f)) q -= 1.0f;
    if (q == 0.0f) return std::copysign(0.0f, a / b);
    const float whole = std::floor(q);
    return q - whole > 0.5f ? whole + 1.0f : whole;
}
// By 0 both give 0, and by -1 nothing overflows.
inline int32_t remainder(int32_t a, int32_t b) {
    if (b == 0 || b == -1) return 0;
    const int32_t r = a % b;
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
inline int32_t floor_divide(int32_t a, int32_t b) {
    if (b == 0) return 0;
    if (b == -1) return int32_t(0u - uint32_t(a));
    return a / b - (a % b != 0 && (a < 0) != (b < 0));
}
}  // namespace detail

#define PLANC_UNARY_OP(name, expression)                               \
    struct name {                                                      \
        static PLANC_INLINE Vec apply(Vec x) { return expression; }    \
    };
// Those that integers take too; arithmetic on them wraps, as numpy's does.
#define PLANC_UNARY_INT_OP(name, expression, scalar)                                            \
    struct name {                                                                               \
        static PLANC_INLINE Vec apply(Vec x) { return expression; }                             \
        static PLANC_INLINE int32_t apply(int32_t x) { return int32_t(uint32_t(scalar)); }      \
    };
PLANC_UNARY_OP(Copy, x)
PLANC_UNARY_INT_OP(Neg, negate(x), 0u - uint32_t(x))
PLANC_UNARY_INT_OP(Abs, abs(x), x < 0 ? 0u - uint32_t(x) : uint32_t(x))
PLANC_UNARY_OP(Exp, exp(x))
PLANC_UNARY_OP(Log, detail::each_lane(x, [](float v) { return std::log(v); }))
PLANC_UNARY_OP(Sqrt, sqrt(x))
PLANC_UNARY_OP(Rsqrt, splat(1.0f) / sqrt(x))
PLANC_UNARY_OP(Reciprocal, splat(1.0f) / x)
PLANC_UNARY_INT_OP(Square, x* x, uint32_t(x) * uint32_t(x))
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
PLANC_UNARY_OP(Ceil, detail::each_lane(x, [](float v) { return std::ceil(v); }))
PLANC_UNARY_OP(Trunc, detail::each_lane(x, [](float v) { return std::trunc(v); }))
PLANC_UNARY_OP(Round, detail::each_lane(x, [](float v) { return std::nearbyint(v); }))
PLANC_UNARY_OP(Expm1, detail::each_lane(x, [](float v) { return std::expm1(v); }))
PLANC_UNARY_OP(Log1p, detail::each_lane(x, [](float v) { return std::log1p(v); }))
// 0 for a NaN.
PLANC_UNARY_INT_OP(Sign, select(less(zero(), x), splat(1.0f), select(less(x, zero()), splat(-1.0f), zero())), (x > 0) - (x < 0))
PLANC_UNARY_OP(Gelu, x* splat(0.5f) * (splat(1.0f) + erf(x * splat(0.70710678f))))
// sqrt(2 / pi) * (x + 0.044715 x^3) inside the tanh.
PLANC_UNARY_OP(GeluTanh, x* splat(0.5f) * (splat(1.0f) + tanh(splat(0.7978845608f) * fma(x * x * x, splat(0.044715f), x))))
#undef PLANC_UNARY_OP
#undef PLANC_UNARY_INT_OP

#define PLANC_BINARY_OP(name, expression, scalar)                                       \
    struct name {                                                                       \
        static PLANC_INLINE Vec apply(Vec a, Vec b) { return expression; }              \
        static PLANC_INLINE int32_t apply(int32_t a, int32_t b) { return scalar; }      \
    };
PLANC_BINARY_OP(Add, a + b, int32_t(uint32_t(a) + uint32_t(b)))
PLANC_BINARY_OP(Sub, a - b, int32_t(uint32_t(a) - uint32_t(b)))
PLANC_BINARY_OP(Mul, a* b, int32_t(uint32_t(a) * uint32_t(b)))
PLANC_BINARY_OP(Maximum, select(is_nan(a), a, max(a, b)), a > b ? a : b)
PLANC_BINARY_OP(Minimum, select(is_nan(a), a, min(a, b)), a < b ? a : b)
// Comparisons: 1 or 0. A NaN is unequal to everything and neither less nor greater.
PLANC_BINARY_OP(Gt, detail::truth(less(b, a)), a > b)
PLANC_BINARY_OP(Ge, detail::truth(less(b, a) | equal(a, b)), a >= b)
PLANC_BINARY_OP(Lt, detail::truth(less(a, b)), a < b)
PLANC_BINARY_OP(Le, detail::truth(less(a, b) | equal(a, b)), a <= b)
PLANC_BINARY_OP(Eq, detail::truth(equal(a, b)), a == b)
PLANC_BINARY_OP(Ne, select(equal(a, b), zero(), splat(1.0f)), a != b)
// Python's: the remainder has the sign of the divisor, the quotient is rounded down.
PLANC_BINARY_OP(Remainder, detail::each_pair(a, b, [](float x, float y) { return detail::remainder(x, y); }), detail::remainder(a, b))
PLANC_BINARY_OP(FloorDivide, detail::each_pair(a, b, [](float x, float y) { return detail::floor_divide(x, y); }), detail::floor_divide(a, b))
#undef PLANC_BINARY_OP

// c != 0 ? a : b; a NaN is not 0.
struct Where {
    static PLANC_INLINE Vec apply(Vec c, Vec a, Vec b) { return select(equal(c, zero()), b, a); }
    static PLANC_INLINE int32_t apply(float c, int32_t a, int32_t b) { return c != 0.0f ? a : b; }
};

struct Div {
    static PLANC_INLINE Vec apply(Vec a, Vec b) { return a / b; }
};

struct Pow {
    static PLANC_INLINE Vec apply(Vec a, Vec b) {
        return detail::each_pair(a, b, [](float base, float exponent) { return std::pow(base, exponent); });
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
