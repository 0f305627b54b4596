// Walking rows: strided [rows, A, B, C] operands whose extents and strides are constants, split over threads by unit.
#pragma once
#include "planc/share.h"
#include "planc/simd.h"

namespace planc {

// Feature axes of a row, outermost first; unused ones are 1.
template <int A, int B, int C>
struct Extent {
    static constexpr int OUTER = A * B, MIDDLE = B, INNER = C;
};

// Distance in elements between neighbours along the rows and along each feature axis; 0 repeats one element.
template <int ROW, int A, int B, int C>
struct Strides {
    static constexpr int INNER = C;
    static PLANC_INLINE int64_t at(int64_t row, int a, int b) { return row * ROW + int64_t(a) * A + int64_t(b) * B; }
};

// Sixteen (or n) elements along the innermost axis, from element i of it.
template <int STRIDE>
PLANC_INLINE Vec gather(const float* p, int i, int n) {
    if constexpr (STRIDE == 0) return splat(*p);
    if constexpr (STRIDE == 1) return load_lanes(p + i, n);
    float lanes[LANES] = {};
    for (int k = 0; k < n; ++k) lanes[k] = p[int64_t(i + k) * STRIDE];
    return load(lanes);
}

// Calls body(row, a, b) for this thread's share of the inner vectors of [rows, A, B, C].
template <class Shape, class Body>
PLANC_INLINE void for_each_inner(int rows, int thread, int threads, Body body) {
    const Range units = share(int64_t(rows) * Shape::OUTER, thread, threads);
    for (int unit = units.begin; unit < units.end; ++unit) {
        const int outer = unit % Shape::OUTER;
        body(int64_t(unit / Shape::OUTER), outer / Shape::MIDDLE, outer % Shape::MIDDLE);
    }
}

// y[r] = x[index[r]]: `bytes` of each row, rows x_stride bytes apart in x and dense in y.
inline void take_rows(const void* x, const int32_t* index, void* y, int64_t bytes, int64_t x_stride, Range rows) {
    for (int r = rows.begin; r < rows.end; ++r) {
        std::memcpy(static_cast<char*>(y) + r * bytes, static_cast<const char*>(x) + index[r] * x_stride, size_t(bytes));
    }
}

}  // namespace planc
