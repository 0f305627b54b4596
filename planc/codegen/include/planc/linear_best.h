// The first of the largest columns of each row of y = x @ W^T (+ bias), which is written nowhere: all that a greedy choice
// takes of logits. Its bits are those of the linear layer's.
#pragma once
#include <limits>

#include "planc/linear.h"
#include "planc/scratch.h"

namespace planc {

// Rows of which each lane keeps the best column that it has seen, in floats that are the thread's own.
template <class Base>
class BestRows : public Base {
    static constexpr int STATE = 3 * LANES;  // of a row: best, its column, whether one was no number
    static constexpr float LEAST = -std::numeric_limits<float>::infinity();

   public:
    static constexpr bool BEST = true;
    BestRows(Base base, int rows) : Base(base), state_(detail::thread_floats<detail::For::BEST>(size_t(rows) * STATE)) {
        for (int row = 0; row < rows; ++row) {
            store(state_ + row * STATE, splat(LEAST));
            store_int(state_ + row * STATE + LANES, splat_int(0));
            store(state_ + row * STATE + 2 * LANES, zero());
        }
    }

    // The first `valid` of columns from one on, of which there may be none.
    PLANC_INLINE void see(int row, int column, Vec x, int valid) const {
        if (valid <= 0) return;
        if (valid < LANES) x = select(less(iota(), splat_int(valid)), x, splat(LEAST));
        float* const state = state_ + row * STATE;
        const Vec best = load(state);
        const Mask better = less(best, x);
        store(state, select(better, x, best));
        store_int(state + LANES, select(better, iota() + splat_int(column), load_int(state + LANES)));
        store(state + 2 * LANES, select(is_nan(x), splat(1.0f), load(state + 2 * LANES)));
    }

    // Of all lanes: the column, or -1 where one is no number, and the bits of its value.
    void write(int row, int32_t* chosen) const {
        const float* const state = state_ + row * STATE;
        int32_t columns[LANES];
        std::memcpy(columns, state + LANES, sizeof columns);
        int best = 0;
        bool strange = false;
        for (int i = 0; i < LANES; ++i) {
            if (state[i] > state[best] || (state[i] == state[best] && columns[i] < columns[best])) best = i;
            strange |= state[2 * LANES + i] > 0.0f;
        }
        const float value = strange ? std::numeric_limits<float>::quiet_NaN() : state[best];
        chosen[0] = strange ? -1 : columns[best];
        std::memcpy(chosen + 1, &value, sizeof value);
    }

   private:
    float* const state_;
};

// Config: that of Linear. For ROWS at most.
template <class Config>
class LinearBest {
    using Layer = Linear<Config>;
    using Base = BestRows<typename Layer::Dense>;
    using Rows = detail::RowsOf<Base, Config>;
    using Tiles = LinearTiles<Config, Rows>;

   public:
    static constexpr int ROWS = Tiles::WHOLE_ROWS;
    using X = typename Layer::X;

    LinearBest(const X* x, const float* x_scale, LinearWeights<Config> weights, int rows)
        : rows_(Rows(Base({x, x_scale, nullptr}, rows))), tiles_(rows_, weights) {}

    // A thread's share of the columns; the last one joins what all have found in chosen [rows, 2]. The scratch memory must
    // hold 2 words of each row and thread.
    void run(int rows, int thread, int threads, const Scratch& scratch, int32_t* chosen) {
        if (rows < Tiles::PANEL_FROM) {
            tiles_.run_direct(rows, share(Tiles::HALF_BLOCKS, thread, threads));
        } else {
            tiles_.run_whole(rows, share(Tiles::PANELS, thread, threads));
        }
        int32_t* const parts = reinterpret_cast<int32_t*>(scratch.floats());
        for (int row = 0; row < rows; ++row) rows_.write(row, parts + (int64_t(thread) * rows + row) * 2);
        if (!scratch.finished(0, 1, threads)) return;
        for (int row = 0; row < rows; ++row) join(parts + row * 2, rows * 2, threads, chosen + row * 2);
    }

   private:
    // Threads have their columns in order, so that of equals the first thread's counts.
    static void join(const int32_t* parts, int stride, int threads, int32_t* chosen) {
        std::memcpy(chosen, parts, 2 * sizeof *chosen);
        for (int t = 1; t < threads && chosen[0] >= 0; ++t) {
            const int32_t* const part = parts + int64_t(t) * stride;
            float best, other;
            std::memcpy(&best, chosen + 1, sizeof best);
            std::memcpy(&other, part + 1, sizeof other);
            if (part[0] < 0 || other > best) std::memcpy(chosen, part, 2 * sizeof *chosen);
        }
    }

    Rows rows_;  // tiles_ has a copy, which sees what this one writes: both have one state
    Tiles tiles_;
};

}  // namespace planc
