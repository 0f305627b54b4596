// Ops over the last axis: reductions to one element, softmax and running sums.
#pragma once
#include <cmath>
#include <limits>

#include "planc/norm.h"

namespace planc {

// Reductions of `WIDTH` elements to one.
template <int WIDTH>
struct Sum {
    static float row(const float* x) {
        return detail::sum_of<WIDTH>([&](int i, int n) PLANC_INLINED { return load_lanes(x + i, n); });
    }
};
template <int WIDTH>
struct Mean {
    static float row(const float* x) { return Sum<WIDTH>::row(x) / float(WIDTH); }
};
template <int WIDTH>
struct Amax {
    static float row(const float* x) {
        float best = x[0];
        for (int i = 1; i < WIDTH; ++i) best = x[i] > best || std::isnan(x[i]) ? x[i] : best;
        return best;
    }
};
template <int WIDTH>
struct Amin {
    static float row(const float* x) {
        float best = x[0];
        for (int i = 1; i < WIDTH; ++i) best = x[i] < best || std::isnan(x[i]) ? x[i] : best;
        return best;
    }
};
template <int WIDTH>
struct Prod {
    static float row(const float* x) {
        double product = 1.0;
        for (int i = 0; i < WIDTH; ++i) product *= double(x[i]);
        return float(product);
    }
};
// The index of the first of the largest; a NaN is the largest.
template <int WIDTH>
struct Argmax {
    static int32_t row(const float* x) {
        int32_t best = 0;
        for (int32_t i = 1; i < WIDTH; ++i) {
            if (x[i] > x[best] || (std::isnan(x[i]) && !std::isnan(x[best]))) best = i;
        }
        return best;
    }
};

// Shape has INNER = 1 here and below, and the strides reach the start of a row.
template <class Reduction, class Shape, class Out, class X, class Y>
void reduce_rows(int rows, int thread, int threads, const float* x, Y* y) {
    for_each_inner<Shape>(rows, thread, threads, [&](const auto& place) {
        y[Out::at(place)] = Reduction::row(x + X::at(place));
    });
}

// Exponentials of what is below the peak over their sum; y may be x. A row of -infinity alone gives NaN.
template <int WIDTH>
struct Softmax {
    static void row(const float* x, float* y) {
        Vec top = splat(-std::numeric_limits<float>::infinity());
        for_each_vec(WIDTH, [&](int i, int n) PLANC_INLINED {
            const Vec v = load_lanes(x + i, n);
            top = max(top, n == LANES ? v : select(less(iota(), splat_int(n)), v, top));
        });
        const Vec peak = splat(max(top));
        const Vec total = splat(detail::sum_of<WIDTH>([&](int i, int n) PLANC_INLINED {
            const Vec e = exp(load_lanes(x + i, n) - peak);
            store_lanes(y + i, e, n);
            return n == LANES ? e : detail::keep_first(e, n);
        }));
        for_each_vec(WIDTH, [&](int i, int n) PLANC_INLINED { store_lanes(y + i, load_lanes(y + i, n) / total, n); });
    }
};

// Sums of the first 1, 2, .. elements, kept in double; y may be x.
template <int WIDTH>
struct CumSum {
    static void row(const float* x, float* y) {
        double total = 0.0;
        for (int i = 0; i < WIDTH; ++i) y[i] = float(total += double(x[i]));
    }
};

template <class Op, class Shape, class Out, class X>
void map_rows(int rows, int thread, int threads, const float* x, float* y) {
    for_each_inner<Shape>(rows, thread, threads, [&](const auto& place) { Op::row(x + X::at(place), y + Out::at(place)); });
}

}  // namespace planc
