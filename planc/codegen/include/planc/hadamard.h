// y = x H, H orthogonal: spreads each feature of a row over the BLOCK features that lie COUNT apart.
#pragma once
#include "planc/simd.h"

namespace planc {

namespace detail {
// Sums and differences of partners HALF apart, then of those half as far apart: the reference's order.
template <int HALF, int BLOCK>
PLANC_INLINE void butterflies(Vec* v) {
    if constexpr (HALF > 1) {  // two stages while their values are in registers
        constexpr int QUARTER = HALF / 2;
        for (int at = 0; at < BLOCK; at += 2 * HALF) {
            for (int i = at; i < at + QUARTER; ++i) {
                const Vec a = v[i] + v[i + HALF], b = v[i + QUARTER] + v[i + HALF + QUARTER];
                const Vec c = v[i] - v[i + HALF], d = v[i + QUARTER] - v[i + HALF + QUARTER];
                v[i] = a + b;
                v[i + QUARTER] = a - b;
                v[i + HALF] = c + d;
                v[i + HALF + QUARTER] = c - d;
            }
        }
        butterflies<HALF / 4, BLOCK>(v);
    } else if constexpr (HALF == 1) {
        for (int i = 0; i < BLOCK; i += 2) {
            const Vec a = v[i], b = v[i + 1];
            v[i] = a + b;
            v[i + 1] = a - b;
        }
    }
}
}  // namespace detail

// Config: WIDTH and HADAMARD (= BLOCK), SHIFT (whether `shift` is taken from x first), SCALE (BLOCK^-1/2) and WORD, whose
// bit b says that feature b of a block is negated. y has room for LANES more, which are written, too: all vectors are
// whole, and what one spills over those behind it, later ones put right.
template <class Config>
PLANC_INLINE void rotate(const float* x, const float* shift, float* y) {
    constexpr int BLOCK = Config::HADAMARD, COUNT = Config::WIDTH / BLOCK, WHOLE = COUNT / LANES * LANES;
    const auto columns = [&](int i) PLANC_INLINED {
        Vec v[BLOCK];
        for (int b = 0; b < BLOCK; ++b) {
            const int at = b * COUNT + i, n = Config::WIDTH - at < LANES ? Config::WIDTH - at : LANES;
            Vec row = load_lanes(x + at, n);
            if constexpr (Config::SHIFT) row = row - load_lanes(shift + at, n);
            v[b] = row * splat((Config::WORD[b / 32] >> (b % 32)) & 1 ? -1.0f : 1.0f);
        }
        detail::butterflies<BLOCK / 2, BLOCK>(v);
        for (int b = 0; b < BLOCK; ++b) store(y + b * COUNT + i, v[b] * splat(Config::SCALE));
    };
    if constexpr (WHOLE < COUNT) columns(WHOLE);
    for (int i = 0; i < WHOLE; i += LANES) columns(i);
}

}  // namespace planc
