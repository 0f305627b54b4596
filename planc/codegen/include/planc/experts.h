// y[t, j] = x[t, (j)] @ W[ids[t, j]]^T (+ bias): each chosen expert's weight streams once a step, over all of its rows.
//
// Slots (t, j) are sorted by expert; an expert's rows then run in the register tiles of the linear layer, found by their
// slots. A row's bits are those of the linear layer: they do not depend on which rows share its expert.
#pragma once
#include <vector>

#include "planc/linear.h"

namespace planc {

namespace detail {

// Slots of one step in order of their experts, kept between steps: a thread allocates for its largest step alone.
struct SlotOrder {
    std::vector<int32_t> slots;  // by expert, each expert's in ascending order; those of no expert last
    std::vector<int32_t> begin;  // [experts + 2]: where each expert's slots begin

    template <class Id>
    void sort(int count, int experts, Id id) {
        if (int(slots.size()) < count) slots.resize(size_t(count));
        begin.assign(size_t(experts) + 2, 0);
        for (int slot = 0; slot < count; ++slot) ++begin[size_t(bucket(id(slot), experts)) + 1];
        for (int e = 0; e <= experts; ++e) begin[size_t(e) + 1] += begin[size_t(e)];
        for (int slot = 0; slot < count; ++slot) slots[size_t(begin[size_t(bucket(id(slot), experts))]++)] = slot;
        for (int e = experts; e > 0; --e) begin[size_t(e)] = begin[size_t(e) - 1];
        begin[0] = 0;
    }

    static int bucket(int32_t id, int experts) { return uint32_t(id) < uint32_t(experts) ? id : experts; }
};

}  // namespace detail

// Rows by slot = token * SLOTS + j. Config: X_ROW, X_SLOT (strides of x in floats), SLOTS, N.
template <class Config>
class SlotRows {
    template <int MR>
    struct Tile {
        const float* x[MR];
        PLANC_INLINE const float* operator()(int m) const { return x[m]; }
    };

   public:
    SlotRows(const float* x, float* y, const int32_t* slots) : x_(x), y_(y), slots_(slots) {}

    template <int MR>
    PLANC_INLINE Tile<MR> tile(int row, int k) const {
        Tile<MR> made;
        for (int m = 0; m < MR; ++m) {
            const int slot = slots_[row + m];
            made.x[m] = x_ + int64_t(slot / Config::SLOTS) * Config::X_ROW + int64_t(slot % Config::SLOTS) * Config::X_SLOT + k;
        }
        return made;
    }
    PLANC_INLINE float* result(int row) const { return y_ + int64_t(slots_[row]) * Config::N; }

   private:
    const float* const x_;
    float* const y_;
    const int32_t* const slots_;
};

// Config: that of LinearTiles and SlotRows, EXPERTS, IDS_ROW (stride of ids in integers, 0 when all tokens share them).
template <class Config>
class ExpertLinear {
    using Format = typename Config::Format;
    using Tiles = LinearTiles<Config, SlotRows<Config>>;
    static constexpr int N = Config::N, K = Config::K, SLOTS = Config::SLOTS, EXPERTS = Config::EXPERTS;
    static constexpr int BLOCKS = (N + BLOCK - 1) / BLOCK;
    static constexpr int PANELS_A_BLOCK = BLOCK / Tiles::PANEL_COLUMNS;
    // What streaming a weight costs, in rows that would be computed meanwhile.
    static constexpr int STREAM_ROWS = 3 * int(sizeof(typename Format::Element));

   public:
    ExpertLinear(const float* x, const int32_t* ids, const void* weight, const float* scale, const float* bias, float* y)
        : x_(x), ids_(ids), weight_(static_cast<const char*>(weight)), scale_(scale), bias_(bias), y_(y) {}

    void run(int tokens, int thread, int threads) const {
        static thread_local detail::SlotOrder order;
        order.sort(tokens * SLOTS, EXPERTS, [&](int slot) { return ids_[int64_t(slot / SLOTS) * Config::IDS_ROW + slot % SLOTS]; });
        run_experts(order, thread, threads);
        const Range none = share(order.begin[EXPERTS + 1] - order.begin[EXPERTS], thread, threads);
        for (int i = none.begin; i < none.end; ++i) {
            const int slot = order.slots[size_t(order.begin[EXPERTS] + i)];
            std::memset(y_ + int64_t(slot) * N, 0, sizeof(float) * N);
        }
    }

   private:
    // Blocks of output channels of the chosen experts, in order; each thread takes those that begin in its part of the cost.
    void run_experts(const detail::SlotOrder& order, int thread, int threads) const {
        int64_t total = 0;
        for (int e = 0; e < EXPERTS; ++e) total += cost(rows_of(order, e)) * BLOCKS;
        const int64_t from = total * thread / threads, to = total * (thread + 1) / threads;
        int64_t at = 0;
        for (int e = 0; e < EXPERTS && at < to; ++e) {
            const int rows = rows_of(order, e);
            if (rows == 0) continue;
            const int64_t each = cost(rows);
            const Range blocks = {first_from(from - at, each), first_from(to - at, each)};
            if (blocks.begin < blocks.end) run_expert(e, order.slots.data() + order.begin[size_t(e)], rows, blocks);
            at += each * BLOCKS;
        }
    }

    static int rows_of(const detail::SlotOrder& order, int e) { return order.begin[size_t(e) + 1] - order.begin[size_t(e)]; }
    static int64_t cost(int rows) { return rows ? rows + STREAM_ROWS : 0; }
    // The first block that begins at `offset` or later.
    static int first_from(int64_t offset, int64_t each) {
        return int(std::clamp<int64_t>((offset + each - 1) / each, 0, BLOCKS));
    }

    void run_expert(int e, const int32_t* slots, int rows, Range blocks) const {
        const char* weight = weight_ + e * block_offset<Format>(BLOCKS, K);
        const Tiles tiles({x_, y_, slots}, weight, scale_ ? scale_ + int64_t(e) * N : nullptr, bias_ ? bias_ + int64_t(e) * N : nullptr);
        if (rows < detail::PANEL_MIN_ROWS) return tiles.run_direct(rows, {blocks.begin * 2, std::min(blocks.end * 2, (N + 31) / 32)});
        const int chunks = (rows + detail::PANEL_ROWS - 1) / detail::PANEL_ROWS;
        const int panels = (N + Tiles::PANEL_COLUMNS - 1) / Tiles::PANEL_COLUMNS;
        const Range columns = {blocks.begin * PANELS_A_BLOCK, std::min(blocks.end * PANELS_A_BLOCK, panels)};
        for (int chunk = 0; chunk < chunks; ++chunk) tiles.run_panels(share(rows, chunk, chunks), columns);
    }

    const float* const x_;
    const int32_t* const ids_;
    const char* const weight_;
    const float* const scale_;
    const float* const bias_;
    float* const y_;
};

// y[t] = sum over j of y[t, j] * w[t, j], j ascending. Config: SLOTS, WIDTH, Y_ROW, Y_SLOT, W_ROW (strides in floats).
template <class Config>
void weighted_sum(int rows, int thread, int threads, const float* x, const float* w, float* y) {
    constexpr int D = Config::WIDTH, PARTS = (D + BLOCK - 1) / BLOCK;
    const Range units = share(int64_t(rows) * PARTS, thread, threads);
    for (int unit = units.begin; unit < units.end; ++unit) {
        const int64_t row = unit / PARTS;
        const int first = unit % PARTS * BLOCK;
        const float* from = x + row * Config::Y_ROW + first;
        const float* weight = w + row * Config::W_ROW;
        for_each_vec(std::min(BLOCK, D - first), [&](int i, int n) PLANC_INLINED {
            Vec total = zero();
            for (int j = 0; j < Config::SLOTS; ++j) {
                total = fma(broadcast(weight + j), load_lanes(from + int64_t(j) * Config::Y_SLOT + i, n), total);
            }
            store_lanes(y + row * D + first + i, total, n);
        });
    }
}

}  // namespace planc
