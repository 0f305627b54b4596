// y[.., m, n] = sum over k of a[.., m, k] * b[.., k, n], products of two activations: k ascending, one accumulator each.
#pragma once
#include <algorithm>

#include "planc/rows.h"
#include "planc/tile.h"

namespace planc {

// Config: N, K, LDB (floats between neighbours of b along k).
template <class Config>
class Matmul {
    static constexpr int N = Config::N, K = Config::K, NV = 4;

   public:
    // One row of y: a is [K], b [K, N].
    static void row(const float* a, const float* b, float* y) {
        int n = 0;
        for (; n + NV * LANES <= N; n += NV * LANES) tile<NV>(a, b + n, y + n, LANES);
        for (; n < N; n += LANES) tile<1>(a, b + n, y + n, std::min(N - n, LANES));
    }

   private:
    // `lanes` of the last vector; a tile of several vectors has whole ones.
    template <int VECS>
    static PLANC_INLINE void tile(const float* a, const float* b, float* y, int lanes) {
        Vec acc[VECS] = {};
        for (int k = 0; k < K; ++k) {
            const Vec factor = broadcast(a + k);
            PLANC_UNROLL for (int v = 0; v < VECS; ++v) {
                acc[v] = fma(factor, load_lanes(b + int64_t(k) * Config::LDB + v * LANES, lanes), acc[v]);
            }
        }
        PLANC_UNROLL for (int v = 0; v < VECS; ++v) store_lanes(y + v * LANES, acc[v], lanes);
    }
};

// Shape has INNER = 1 and the strides reach a row of y and of a, and a matrix of b.
template <class Product, class Shape, class Out, class A, class B>
void matmul_rows(int rows, int thread, int threads, const float* a, const float* b, float* y) {
    for_each_inner<Shape>(rows, thread, threads, [&](const auto& place) {
        Product::row(a + A::at(place), b + B::at(place), y + Out::at(place));
    });
}

}  // namespace planc
