// codes[r] = round(x[r] / scale[r]), scale[r] = amax(|x[r]|) / LIMIT: rows of activations in 8 bits.
#pragma once
#include "planc/hadamard.h"
#include "planc/narrow.h"
#include "planc/rows.h"

namespace planc {

// Config: WIDTH (of the last axis), Element (int8_t or F8), and where rows turn before they are rounded: HADAMARD (the
// size of a block, else 1), SCALE and WORD (the blocks' signs). Codes and scales are dense; Shape has INNER = 1 and the
// strides reach the start of a row.
template <class Config, class Shape, class Out, class X>
void quantize_rows(int rows, int thread, int threads, const float* x, typename Config::Element* codes, float* scales) {
    for_each_inner<Shape>(rows, thread, threads, [&](const auto& place) {
        const int64_t at = Out::at(place);
        const float* row = x + X::at(place);
        if constexpr (Config::HADAMARD > 1) {
            alignas(64) float turned[Config::WIDTH];
            rotate<Config::WIDTH, Config::HADAMARD, Config>(row, turned, Config::SCALE);
            scales[at / Config::WIDTH] = narrow<Config::WIDTH>(turned, codes + at, 1);
        } else {
            scales[at / Config::WIDTH] = narrow<Config::WIDTH>(row, codes + at, 1);
        }
    });
}

}  // namespace planc
