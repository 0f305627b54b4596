// Rotary position embedding: y = x[T, HEADS, WIDTH] with its first 2 * HALF elements turned by the angle of the position.
#pragma once
#include "planc/share.h"

namespace planc {

// Config: HEADS, WIDTH, HALF (pairs that turn), INTERLEAVED (pairs are (2i, 2i+1) rather than (i, i+HALF)),
// X_ROW and X_HEAD (strides of x in floats). y is dense. cos and sin are f32 [max positions, HALF].
template <class Config>
class Rotary {
    static constexpr int D = Config::WIDTH, HALF = Config::HALF;

   public:
    static void run(int rows, int thread, int threads, const float* x, const float* cos, const float* sin,
                    const int32_t* positions, float* y) {
        const Range units = share(int64_t(rows) * Config::HEADS, thread, threads);
        for (int unit = units.begin; unit < units.end; ++unit) {
            const int row = unit / Config::HEADS, head = unit % Config::HEADS;
            const float* from = x + int64_t(row) * Config::X_ROW + int64_t(head) * Config::X_HEAD;
            turn(from, cos, sin, positions[row], y + int64_t(unit) * D);
        }
    }

    // One head at a position, from `x` to `y`, which do not overlap.
    static PLANC_INLINE void turn(const float* x, const float* cos, const float* sin, int position, float* y) {
        const int64_t angle = int64_t(position) * HALF;
        if constexpr (Config::INTERLEAVED) {
            turn_neighbours(x, cos + angle, sin + angle, y);
        } else {
            turn_halves(x, cos + angle, sin + angle, y);
        }
        if constexpr (2 * HALF < D) std::memcpy(y + 2 * HALF, x + 2 * HALF, sizeof(float) * (D - 2 * HALF));
    }

   private:
    static PLANC_INLINE void turn_halves(const float* x, const float* cos, const float* sin, float* y) {
        for_each_vec(HALF, [&](int i, int n) PLANC_INLINED {
            const Vec a = load_lanes(x + i, n), b = load_lanes(x + HALF + i, n);
            const Vec c = load_lanes(cos + i, n), s = load_lanes(sin + i, n);
            store_lanes(y + i, a * c - b * s, n);
            store_lanes(y + HALF + i, b * c + a * s, n);
        });
    }

    static PLANC_INLINE void turn_neighbours(const float* x, const float* cos, const float* sin, float* y) {
        for (int i = 0; i < HALF; ++i) {
            const float a = x[2 * i], b = x[2 * i + 1];
            y[2 * i] = rounded(a * cos[i]) - b * sin[i];
            y[2 * i + 1] = rounded(b * cos[i]) + a * sin[i];
        }
    }

    // A product that stays one: gcc 12 makes a difference and a sum of neighbours one multiply-add, -ffp-contract=off or not.
    static PLANC_INLINE float rounded(float product) {
        asm("" : "+m"(product));
        return product;
    }
};

}  // namespace planc
