// y = op(x, ..) element by element over strided, broadcast operands: unary, binary, gated activations, copies.
#pragma once
#include "planc/activation.h"
#include "planc/rows.h"

namespace planc {

// Op maps Vec.. to Vec. Shape is an Extent; Out and In.. are the Strides of y and of each x. y may be the first x itself.
template <class Op, class Shape, class Out, class... In>
struct Pointwise {
    template <class... X>
    static void run(int rows, int thread, int threads, float* y, const X*... x) {
        static_assert(Out::INNER == 1, "the innermost axis of the result is dense");
        for_each_inner<Shape>(rows, thread, threads, [&](const auto& place) PLANC_INLINED {
            float* out = y + Out::at(place);
            for_each_vec(Shape::INNER, [&](int i, int n) PLANC_INLINED {
                const Vec value = Op::apply(gather<In::INNER>(x + In::at(place), i, n)...);
                store_lanes(out + i, value, n);
            });
        });
    }
};

// The same over any element types, one at a time: integers (positions) and casts, a few elements a step.
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
