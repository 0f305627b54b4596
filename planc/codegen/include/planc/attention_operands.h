// What attention multiplies, in 32-bit lanes: floats, or pairs of bf16 where the target multiplies those (+bf16).
//
// A lane of a key's step i holds its elements d = i, or 2i and 2i + 1. A lane of a value's step holds a column at
// position j, or at j and j + 1, j even. Codes of 8 bits are exact in bf16, and none is so small that it would count as zero;
// queries and probabilities are rounded.
#pragma once
#include "planc/dots.h"
#include "planc/kv.h"
#include "planc/vecmath.h"

namespace planc {

// Config: that of Cache.
template <class Config>
struct Operands {
    using Element = typename Config::Element;
    static constexpr int K_DIM = Config::K_DIM, V_DIM = Config::V_DIM, BLOCK_SIZE = Config::BLOCK_SIZE;
    static constexpr bool PAIRED = BF16_DOTS && !std::is_same_v<Element, float>;
    static constexpr int STEP = PAIRED ? 2 : 1;
    static constexpr int KEY_STEPS = (K_DIM + STEP - 1) / STEP;
    static constexpr int QUERY_WIDTH = (KEY_STEPS + LANES - 1) / LANES * LANES;
    static constexpr int VALUE_VECS = (V_DIM + LANES - 1) / LANES;

    static PLANC_INLINE Vec multiply_add(Vec a, Vec b, Vec sum) {
        if constexpr (PAIRED) return dot_bf16(as_int(a), as_int(b), sum);
        return fma(a, b, sum);
    }

    // 2^x, x <= 0, as exact as probabilities are kept.
    static PLANC_INLINE Vec power_below_one(Vec x) { return PAIRED ? coarse_power_of_two_below_one(x) : power_of_two_below_one(x); }

    // Step i of the 16 keys that begin at `key`.
    static PLANC_INLINE Vec key(const Element* key, int i) {
        const Element* row = key + int64_t(i) * STEP * BLOCK_SIZE;
        if constexpr (!PAIRED) return load_as_float(row);
        if (K_DIM % 2 == 1 && i == KEY_STEPS - 1) return pair(load_as_float(row), zero());
        return pair_rows(row, row + BLOCK_SIZE);
    }

    // Columns 16v.. of the value at `row`, and of the one at the next position.
    static PLANC_INLINE Vec value(const Element* row, int v) {
        if (V_DIM % LANES == 0 || v + 1 < VALUE_VECS) {
            if constexpr (PAIRED) return pair_rows(row + v * LANES, row + V_DIM + v * LANES);
            return load_as_float(row + v * LANES);
        }
        constexpr int LAST = V_DIM % LANES == 0 ? LANES : V_DIM % LANES;
        const Vec x = load_as_float(row + v * LANES, LAST);
        if constexpr (PAIRED) return pair(x, load_as_float(row + V_DIM + v * LANES, LAST));
        return x;
    }

    // Thirty-two weights in a row as sixteen pairs.
    static PLANC_INLINE Vec round_pairs(Vec first, Vec second) { return as_float(bf16_pairs(first, second)); }

    // q[K_DIM] as pairs.
    static PLANC_INLINE void round_query(const float* q, float* pairs) {
        for (int d = 0; d < K_DIM; d += 2 * LANES) {
            const int left = K_DIM - d;
            const Vec first = load_lanes(q + d, std::min(left, LANES));
            const Vec second = left > LANES ? load_lanes(q + d + LANES, std::min(left - LANES, LANES)) : zero();
            store(pairs + d / 2, round_pairs(first, second));
        }
    }

    // A step from position j on without what lies outside of the part, which may hold anything.
    static PLANC_INLINE Vec only(Vec x, int j, Range part) {
        if constexpr (!PAIRED) return x;
        const uint32_t seen = (j >= part.begin ? 0xffffu : 0u) | (j + 1 < part.end ? 0xffff0000u : 0u);
        return as_float(as_int(x) & splat_int(int32_t(seen)));
    }

   private:
    // Floats that are bf16 already, side by side.
    static PLANC_INLINE Vec pair(Vec first, Vec second) { return as_float(shift_right<16>(as_int(first)) | as_int(second)); }

    static PLANC_INLINE Vec pair_rows(const Element* first, const Element* second) {
        if constexpr (std::is_same_v<Element, uint16_t>) {
            return as_float(bf16_zip(first, second));
        } else {
            return pair(load_as_float(first), load_as_float(second));
        }
    }
};

}  // namespace planc
