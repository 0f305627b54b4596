// Register tiles: how many rows and vectors a kernel keeps in registers, and loops whose index is a constant.
#pragma once
#include <type_traits>

#include "planc/simd.h"

namespace planc {

// Rows that share one load of weights, keys or values.
constexpr int MAX_TILE_ROWS = TILE_ACCUMULATORS < 6 ? TILE_ACCUMULATORS : 6;

// Vectors beside `rows` rows so that all accumulators stay in registers.
constexpr int tile_vecs(int rows, int accumulators = TILE_ACCUMULATORS) {
    return rows * 4 <= accumulators ? 4 : rows * 2 <= accumulators ? 2 : 1;
}

// Calls body(std::integral_constant<int, I>) for I = 0..COUNT-1.
template <int COUNT, int I = 0, class Body>
PLANC_INLINE void unrolled(Body body) {
    if constexpr (I < COUNT) {
        body(std::integral_constant<int, I>{});
        unrolled<COUNT, I + 1>(body);
    }
}

}  // namespace planc
