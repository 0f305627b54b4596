// codes[r] = round(x[r] / scale[r]), scale[r] = amax(|x[r]|) / LIMIT: rows of activations in 8 bits, or groups of each row.
#pragma once
#include "planc/hadamard.h"
#include "planc/narrow.h"
#include "planc/rows.h"

namespace planc {

namespace detail {
// How many features share a scale.
template <class Config>
constexpr int features_a_scale() {
    if constexpr (requires { Config::GROUP; }) return Config::GROUP;
    return Config::WIDTH;
}
}  // namespace detail

// Config: WIDTH (of the last axis), Element (int8_t or F8); SHIFT, whether a vector is taken from each row; and where rows
// turn before they are rounded: HADAMARD (the size of a block, else 1), SCALE and WORD (the blocks' signs); OUTLIERS, how
// many features have a second digit, else 0; maybe GROUP, which divides WIDTH: so many features share a scale, not a row's.
// Codes and scales are dense.
template <class Config>
struct Rounding {
    static constexpr int WIDTH = Config::WIDTH, CODES = WIDTH + 2 * Config::OUTLIERS;
    static constexpr bool AS_IT_IS = !Config::SHIFT && Config::HADAMARD == 1;
    const float* shift;
    const int32_t* outliers;
    typename Config::Element* codes;
    float* scales;

    // Row number `row` is x[WIDTH].
    PLANC_INLINE void operator()(const float* x, int64_t row) const {
        alignas(64) float own[AS_IT_IS ? 1 : WIDTH + LANES];  // whole vectors reach beyond the end
        typename Config::Element* to = codes + row * CODES;
        if constexpr (Config::HADAMARD > 1) {
            rotate<Config>(x, shift, own);
        } else if constexpr (Config::SHIFT) {
            for_each_vec(WIDTH, [&](int i, int n) PLANC_INLINED { store_lanes(own + i, load_lanes(x + i, n) - load_lanes(shift + i, n), n); });
        }
        constexpr int GROUP = detail::features_a_scale<Config>(), SCALES = WIDTH / GROUP;
        static_assert(WIDTH % GROUP == 0 && (SCALES == 1 || Config::OUTLIERS == 0));
        const float* const from = AS_IT_IS ? x : own;
        for (int i = 0; i < SCALES; ++i) scales[row * SCALES + i] = narrow<GROUP>(from + i * GROUP, to + i * GROUP, 1);
        if constexpr (Config::OUTLIERS > 0) second_digits<WIDTH, Config::OUTLIERS>(from, scales[row], outliers, to);
    }
};

// Shape has INNER = 1 and the strides reach the start of a row: X those of x, Out those of as many dense rows.
template <class Config, class Shape, class Out, class X>
void quantize_rows(int rows, int thread, int threads, const float* x, const Rounding<Config>& round) {
    for_each_inner<Shape>(rows, thread, threads, [&](const auto& place) {
        round(x + X::at(place), Out::at(place) / Config::WIDTH);
    });
}

// The same of rows that `make(place, y)` writes to y[WIDTH], which is this thread's own.
template <class Config, class Shape, class Out, class Make>
void quantize_made(int rows, int thread, int threads, const Make& make, const Rounding<Config>& round) {
    alignas(64) float y[Config::WIDTH + LANES];  // compilers warn of a last vector that masks its end
    for_each_inner<Shape>(rows, thread, threads, [&](const auto& place) {
        make(place, y);
        round(y, Out::at(place) / Config::WIDTH);
    });
}

}  // namespace planc
