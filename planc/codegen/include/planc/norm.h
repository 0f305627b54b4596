// RMS and layer norm over the last axis, alone or after a residual add.
//
// A row's sum runs in 64 lanes: lane = element % 64, elements ascending, lanes folded in a fixed order.
#pragma once
#include <cmath>

#include "planc/rows.h"
#include "planc/vecmath.h"

namespace planc {

namespace detail {

// The sum over i of value(i, lanes), a Vec whose unused lanes are zero.
template <int LENGTH, class Value>
PLANC_INLINE float sum_of(Value value) {
    Vec acc[4] = {zero(), zero(), zero(), zero()};
    int i = 0;
    for (; i + 4 * LANES <= LENGTH; i += 4 * LANES) {
        PLANC_UNROLL for (int k = 0; k < 4; ++k) acc[k] = acc[k] + value(i + k * LANES, LANES);
    }
    PLANC_UNROLL for (int k = 0; k < 4; ++k) {
        const int n = LENGTH - i - k * LANES;
        if (n > 0) acc[k] = acc[k] + value(i + k * LANES, n < LANES ? n : LANES);
    }
    return sum((acc[0] + acc[2]) + (acc[1] + acc[3]));
}

PLANC_INLINE Vec keep_first(Vec x, int n) { return select(less(iota(), splat_int(n)), x, zero()); }

}  // namespace detail

// Config: WIDTH (of the last axis), EPS, WEIGHT, BIAS (are there such parameters).
template <class Config>
struct RmsNorm {
    static constexpr int D = Config::WIDTH;

    // y = x / sqrt(mean(x^2) + eps) * weight; y may be x.
    static void row(const float* x, const float* weight, const float*, float* y) {
        const float squares = detail::sum_of<D>([&](int i, int n) PLANC_INLINED {
            const Vec v = load_lanes(x + i, n);
            return v * v;
        });
        const Vec factor = splat(1.0f / std::sqrt(squares / float(D) + Config::EPS));
        for_each_vec(D, [&](int i, int n) PLANC_INLINED {
            Vec v = load_lanes(x + i, n) * factor;
            if constexpr (Config::WEIGHT) v = v * load_lanes(weight + i, n);
            store_lanes(y + i, v, n);
        });
    }
};

template <class Config>
struct LayerNorm {
    static constexpr int D = Config::WIDTH;

    // y = (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias; y may be x.
    static void row(const float* x, const float* weight, const float* bias, float* y) {
        const float total = detail::sum_of<D>([&](int i, int n) PLANC_INLINED { return load_lanes(x + i, n); });
        const Vec mean = splat(total / float(D));
        const float squares = detail::sum_of<D>([&](int i, int n) PLANC_INLINED {
            const Vec v = load_lanes(x + i, n) - mean;
            return n == LANES ? v * v : detail::keep_first(v * v, n);
        });
        const Vec factor = splat(1.0f / std::sqrt(squares / float(D) + Config::EPS));
        for_each_vec(D, [&](int i, int n) PLANC_INLINED {
            Vec v = (load_lanes(x + i, n) - mean) * factor;
            if constexpr (Config::WEIGHT) v = v * load_lanes(weight + i, n);
            if constexpr (Config::BIAS) v = v + load_lanes(bias + i, n);
            store_lanes(y + i, v, n);
        });
    }
};

// Makers of rows: (place, y) writes the norm of the row that is there to y[D]. Strides reach the start of a row.
template <class Norm, class X>
struct NormOf {
    const float *x, *weight, *bias;
    template <class Where>
    PLANC_INLINE void operator()(const Where& place, float* y) const {
        Norm::row(x + X::at(place), weight, bias, y);
    }
};

// total = x1 + x2, which is written, too, and its norm.
template <class Norm, class Total, class X1, class X2>
struct NormOfSum {
    const float *x1, *x2, *weight, *bias;
    float* total;
    template <class Where>
    PLANC_INLINE void operator()(const Where& place, float* y) const {
        const float *p = x1 + X1::at(place), *q = x2 + X2::at(place);
        float* t = total + Total::at(place);
        for_each_vec(Norm::D, [&](int i, int n) PLANC_INLINED {
            store_lanes(t + i, load_lanes(p + i, n) + load_lanes(q + i, n), n);
        });
        Norm::row(t, weight, bias, y);
    }
};

}  // namespace planc
