// y = op(x, ..) element by element over strided, broadcast operands: unary, binary, gated activations, copies.
#pragma once
#include "planc/activation.h"
#include "planc/rows.h"

namespace planc {

// y[LENGTH] = Op of each x at its stride.
template <class Op, int LENGTH, int... STRIDES, class... X>
PLANC_INLINE void map_row(float* y, const X*... x) {
    for_each_vec(LENGTH, [&](int i, int n) PLANC_INLINED { store_lanes(y + i, Op::apply(gather<STRIDES>(x, i, n)...), n); });
}

// Op maps Vec.. to Vec. Shape is an Extent; Out and In.. are the Strides of y and of each x. y may be the first x itself.
template <class Op, class Shape, class Out, class... In>
struct Pointwise {
    template <class... X>
    static void run(int rows, int thread, int threads, float* y, const X*... x) {
        static_assert(Out::INNER == 1, "the innermost axis of the result is dense");
        for_each_inner<Shape>(rows, thread, threads, [&](const auto& place) PLANC_INLINED {
            map_row<Op, Shape::INNER, In::INNER...>(y + Out::at(place), x + In::at(place)...);
        });
    }
};

// A maker of rows, see make_rows: (place, y) writes Op of two vectors to y[WIDTH]; A and B reach their starts.
template <class Op, int WIDTH, class A, class B>
struct PairOf {
    const float *a, *b;
    template <class Where>
    PLANC_INLINE void operator()(const Where& place, float* y) const {
        map_row<Op, WIDTH, 1, 1>(y, a + A::at(place), b + B::at(place));
    }
};

// The same as Pointwise over any element types, one at a time: integers (positions) and casts, a few elements a step.
template <class Op, class Shape, class Out, class... In>
struct ScalarPointwise {
    template <class Y, class... X>
    static void run(int rows, int thread, int threads, Y* y, const X*... x) {
        for_each_inner<Shape>(rows, thread, threads, [&](const auto& place) {
            for (int i = 0; i < Shape::INNER; ++i) {
                y[Out::at(place) + i] = Y(Op::apply(x[In::at(place) + int64_t(i) * In::INNER]...));
            }
        });
    }
};

}  // namespace planc
