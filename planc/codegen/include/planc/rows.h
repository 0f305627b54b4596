// Walking rows: strided [rows, A, .., Z] operands whose extents and strides are constants, split over threads by unit.
#pragma once
#include "planc/share.h"
#include "planc/simd.h"

namespace planc {

// Feature axes of a row, outermost first.
template <int... LENGTHS>
struct Extent {
    static constexpr int AXES = sizeof...(LENGTHS);
    static constexpr int LENGTH[AXES] = {LENGTHS...};
    static constexpr int INNER = LENGTH[AXES - 1];
    static constexpr int OUTER = (LENGTHS * ...) / (INNER > 0 ? INNER : 1);
};

// Where a vector along the innermost axis begins: the row, and an index along each other feature axis.
template <class Shape>
struct Place {
    int64_t row;
    int axis[Shape::AXES];  // the innermost is not used
};

// Distance in elements between neighbours along the rows and along each feature axis; 0 repeats one element.
template <int ROW, int... STRIDES>
struct Strides {
    static constexpr int AXES = sizeof...(STRIDES);
    static constexpr int STRIDE[AXES] = {STRIDES...};
    static constexpr int INNER = STRIDE[AXES - 1];
    template <class Shape>
    static PLANC_INLINE int64_t at(const Place<Shape>& place) {
        int64_t offset = place.row * ROW;
        PLANC_UNROLL for (int i = 0; i + 1 < Shape::AXES; ++i) offset += int64_t(place.axis[i]) * STRIDE[i];
        return offset;
    }
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

// Calls body(place) for this thread's share of the vectors along the innermost axis.
template <class Shape, class Body>
PLANC_INLINE void for_each_inner(int rows, int thread, int threads, Body body) {
    const Range units = share(int64_t(rows) * Shape::OUTER, thread, threads);
    for (int unit = units.begin; unit < units.end; ++unit) {
        Place<Shape> place = {unit / Shape::OUTER, {}};
        int rest = unit % Shape::OUTER;
        PLANC_UNROLL for (int i = Shape::AXES - 2; i >= 0; --i) {
            place.axis[i] = rest % Shape::LENGTH[i];
            rest /= Shape::LENGTH[i];
        }
        body(place);
    }
}

// y[rows, .., WIDTH]: each row as `make(place, y)` writes it. Shape has INNER = 1 and Out reaches the start of a row.
template <class Shape, class Out, class Make>
void make_rows(int rows, int thread, int threads, const Make& make, float* y) {
    for_each_inner<Shape>(rows, thread, threads, [&](const auto& place) { make(place, y + Out::at(place)); });
}

// y[r] = x[index[r]]: `bytes` of each row, rows x_stride bytes apart in x and dense in y.
inline void take_rows(const void* x, const int32_t* index, void* y, int64_t bytes, int64_t x_stride, Range rows) {
    for (int r = rows.begin; r < rows.end; ++r) {
        std::memcpy(static_cast<char*>(y) + r * bytes, static_cast<const char*>(x) + index[r] * x_stride, size_t(bytes));
    }
}

}  // namespace planc
