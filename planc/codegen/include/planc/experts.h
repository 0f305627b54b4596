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

// Rows by slot = token * SLOTS + j. Config: X_ROW, X_SLOT (strides of x in elements), SCALE_ROW, SCALE_SLOT (of its scales),
// SLOTS, N.
template <class Config>
class SlotRows {
    template <int MR>
    struct Tile {
        const float* x[MR];
        PLANC_INLINE const float* operator()(int m) const { return x[m]; }
    };

   public:
    using X = typename Config::Format::X;
    static constexpr bool BEST = false;
    SlotRows(const X* x, const float* scale, float* y, const int32_t* slots) : x_(x), scale_(scale), y_(y), slots_(slots) {}

    template <int MR>
    PLANC_INLINE Tile<MR> tile(int row, int k) const {
        Tile<MR> made;
        for (int m = 0; m < MR; ++m) made.x[m] = x(row + m) + k;
        return made;
    }
    PLANC_INLINE const X* x(int row) const { return x_ + at(row, Config::X_ROW, Config::X_SLOT); }
    PLANC_INLINE float scale(int row, int i = 0) const { return scale_[at(row, Config::SCALE_ROW, Config::SCALE_SLOT) + i]; }
    PLANC_INLINE float* result(int row) const { return y_ + int64_t(slots_[row]) * Config::N; }

   private:
    PLANC_INLINE int64_t at(int row, int64_t token_stride, int64_t slot_stride) const {
        const int slot = slots_[row];
        return slot / Config::SLOTS * token_stride + slot % Config::SLOTS * slot_stride;
    }

    const X* const x_;
    const float* const scale_;
    float* const y_;
    const int32_t* const slots_;
};

// Config: that of LinearTiles and SlotRows, EXPERTS, IDS_ROW (stride of ids in integers, 0 when all tokens share them).
template <class Config>
class ExpertLinear {
    using Format = typename Config::Format;
    using Rows = detail::RowsOf<SlotRows<Config>, Config>;
    using Tiles = LinearTiles<Config, Rows>;
    static constexpr int EXPERTS = Config::EXPERTS, SLOTS = Config::SLOTS, N = Config::N, K = Config::K;
    static constexpr int BLOCKS = (N + BLOCK - 1) / BLOCK;
    static constexpr int PANELS_A_BLOCK = BLOCK / Tiles::PANEL_COLUMNS;
    // What streaming a weight costs, in rows that would be computed meanwhile: 3 for each byte of it.
    static constexpr int STREAM_ROWS = 3 * GROUP_BYTES / (BLOCK * Format::GROUP);
    static constexpr int SCALES = N * (Format::SCALE_K ? (K + Format::SCALE_K - 1) / std::max(Format::SCALE_K, 1) : 1);

   public:
    using X = typename Format::X;

    ExpertLinear(const X* x, const float* x_scale, const int32_t* ids, LinearWeights<Config> weights, float* y)
        : x_(x), x_scale_(x_scale), ids_(ids), from_(weights), y_(y) {}

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
        auto of_expert = [&](const auto* values, int64_t count) { return values ? values + e * count : nullptr; };
        const LinearWeights<Config> weights = {from_.weight + e * block_offset<Format>(BLOCKS, K), of_expert(from_.scale, SCALES),
                                               of_expert(from_.zeros, SCALES), of_expert(from_.bias, N)};
        Tiles tiles(Rows({x_, x_scale_, y_, slots}), weights);
        if (rows < Tiles::PANEL_FROM) return tiles.run_direct(rows, {blocks.begin * 2, std::min(blocks.end * 2, (N + 31) / 32)});
        const int chunks = (rows + Tiles::CHUNK_ROWS - 1) / Tiles::CHUNK_ROWS;
        const int panels = (N + Tiles::PANEL_COLUMNS - 1) / Tiles::PANEL_COLUMNS;
        const Range columns = {blocks.begin * PANELS_A_BLOCK, std::min(blocks.end * PANELS_A_BLOCK, panels)};
        for (int chunk = 0; chunk < chunks; ++chunk) tiles.run_panels(share(rows, chunk, chunks), columns);
    }

    const X* const x_;
    const float* const x_scale_;
    const int32_t* const ids_;
    const LinearWeights<Config> from_;
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
