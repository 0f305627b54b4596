// codes[r] = round(x[r] / scale[r]), scale[r] = amax(|x[r]|) / LIMIT: rows of activations in 8 bits.
#pragma once
#include "planc/hadamard.h"
#include "planc/narrow.h"
#include "planc/rows.h"

namespace planc {

// Config: WIDTH (of the last axis), Element (int8_t or F8); SHIFT, whether a vector is taken from each row; and where rows
// turn before they are rounded: HADAMARD (the size of a block, else 1), SCALE and WORD (the blocks' signs); OUTLIERS, how
// many features have a second digit, else 0. Codes and scales are dense; Shape has INNER = 1 and the strides reach the start of a row.
template <class Config, class Shape, class Out, class X>
void quantize_rows(int rows, int thread, int threads, const float* x, const float* shift, const int32_t* outliers,
                   typename Config::Element* codes, float* scales) {
    constexpr int WIDTH = Config::WIDTH;
    constexpr bool AS_IT_IS = !Config::SHIFT && Config::HADAMARD == 1;
    alignas(64) float own[AS_IT_IS ? 1 : WIDTH + LANES];  // whole vectors reach beyond the end
    for_each_inner<Shape>(rows, thread, threads, [&](const auto& place) {
        const int64_t at = Out::at(place);
        const float* row = x + X::at(place);
        if constexpr (Config::HADAMARD > 1) {
            rotate<Config>(row, shift, own);
        } else if constexpr (Config::SHIFT) {
            for_each_vec(WIDTH, [&](int i, int n) PLANC_INLINED { store_lanes(own + i, load_lanes(row + i, n) - load_lanes(shift + i, n), n); });
        }
        const float scale = narrow<WIDTH>(AS_IT_IS ? row : own, codes + at, 1);
        if constexpr (Config::OUTLIERS > 0) {
            second_digits<WIDTH, Config::OUTLIERS>(AS_IT_IS ? row : own, scale, outliers, codes + at);
        }
        scales[at / (WIDTH + 2 * Config::OUTLIERS)] = scale;
    });
    (void)shift, (void)outliers;
}

}  // namespace planc
