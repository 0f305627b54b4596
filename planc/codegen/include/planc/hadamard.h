// y = x H, H orthogonal: spreads each feature of a row over the BLOCK features that lie COUNT apart.
#pragma once
#include "planc/tile.h"

namespace planc {

namespace detail {
// Stages that are done while their values are in registers.
constexpr int STAGES_AT_ONCE = TILE_ACCUMULATORS >= 16 ? 4 : 2;

// Sums and differences of partners HALF apart, then of those half as far apart, and so on for STAGES: the reference's
// order. Values come from `take(b)` and go to `give(b, value)`.
template <int HALF, int STAGES, int BLOCK, class Take, class Give>
PLANC_INLINE void butterflies(Take take, Give give) {
    constexpr int COUNT = 1 << STAGES, APART = 2 * HALF / COUNT;
    for (int at = 0; at < BLOCK; at += 2 * HALF) {
        for (int i = at; i < at + APART; ++i) {
            Vec v[COUNT];
            PLANC_UNROLL for (int j = 0; j < COUNT; ++j) v[j] = take(i + j * APART);
            unrolled<STAGES>([&](auto stage) PLANC_INLINED {
                constexpr int NEAR = COUNT >> (stage.value + 1);
                PLANC_UNROLL for (int j = 0; j < COUNT; ++j) {
                    if (j & NEAR) continue;
                    const Vec a = v[j], b = v[j + NEAR];
                    v[j] = a + b;
                    v[j + NEAR] = a - b;
                }
            });
            PLANC_UNROLL for (int j = 0; j < COUNT; ++j) give(i + j * APART, v[j]);
        }
    }
}

// All stages from HALF on: the first values from `take`, what comes of the last to `give`, `held` has room for a block.
template <int HALF, int BLOCK, class Take, class Give>
PLANC_INLINE void all_butterflies(Vec* held, Take take, Give give) {
    constexpr int LEFT = HALF == 0 ? 0 : 32 - __builtin_clz(unsigned(HALF));  // stages: 1 for HALF = 1
    constexpr int STAGES = LEFT < STAGES_AT_ONCE ? LEFT : STAGES_AT_ONCE;
    if constexpr (LEFT == STAGES) {
        butterflies<HALF, STAGES, BLOCK>(take, give);
    } else {
        butterflies<HALF, STAGES, BLOCK>(take, [&](int b, Vec v) PLANC_INLINED { held[b] = v; });
        all_butterflies<(HALF >> STAGES), BLOCK>(held, [&](int b) PLANC_INLINED { return held[b]; }, give);
    }
}

// What each feature of a block is multiplied with: -1 where the bit of WORD says so.
template <class Config>
struct Signs {
    float of[Config::HADAMARD];
    constexpr Signs() : of{} {
        for (int b = 0; b < Config::HADAMARD; ++b) of[b] = (Config::WORD[b / 32] >> (b % 32)) & 1 ? -1.0f : 1.0f;
    }
};
}  // namespace detail

// Config: WIDTH and HADAMARD (= BLOCK), SHIFT (whether `shift` is taken from x first), SCALE (BLOCK^-1/2) and WORD, whose
// bit b says that feature b of a block is negated. y has room for LANES more, which are written, too: all vectors are
// whole, and what one spills over those behind it, later ones put right.
template <class Config>
PLANC_INLINE void rotate(const float* x, const float* shift, float* y) {
    constexpr int BLOCK = Config::HADAMARD, COUNT = Config::WIDTH / BLOCK, WHOLE = COUNT / LANES * LANES;
    static constexpr detail::Signs<Config> SIGNS;
    const auto columns = [&](int i) PLANC_INLINED {
        Vec held[BLOCK];
        const auto take = [&](int b) PLANC_INLINED {
            const int at = b * COUNT + i, n = Config::WIDTH - at < LANES ? Config::WIDTH - at : LANES;
            Vec row = load_lanes(x + at, n);
            if constexpr (Config::SHIFT) row = row - load_lanes(shift + at, n);
            return row * broadcast(SIGNS.of + b);
        };
        const auto give = [&](int b, Vec v) PLANC_INLINED { store(y + b * COUNT + i, v * splat(Config::SCALE)); };
        detail::all_butterflies<BLOCK / 2, BLOCK>(held, take, give);
    };
    if constexpr (WHOLE < COUNT) columns(WHOLE);
    for (int i = 0; i < WHOLE; i += LANES) columns(i);
}

}  // namespace planc
