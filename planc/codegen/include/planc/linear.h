// y[M, N] = x[M, K] @ W^T (+ bias) over packed weights, W in f32, bf16 or int8 with a factor a column.
//
// Every y has one accumulator that meets k = 0, 1, .. K-1 in order by fused multiply-add; tile shapes, threads and the
// number of rows decide where that happens and never change a bit. Partial sums wait in y between two blocks of k: an
// f32 store and load is exact.
#pragma once
#include <algorithm>

#include "planc/share.h"
#include "planc/tile.h"
#include "planc/weights.h"

namespace planc {

namespace detail {

constexpr int PREFETCH_BYTES = 4096;  // ahead of the line in use: some 100 ns at 40 GB/s
constexpr int PANEL_K = 256;          // k of an unpacked panel: 16 KB for 16 columns, half of the L1 cache
constexpr int PANEL_ROWS = 192;       // rows a panel serves: with PANEL_K they take 192 KB, within the L2 cache
constexpr int PANEL_MIN_ROWS = 24;    // from here on unpacking a panel costs less than widening in every row tile

// A panel is one row tile's weights already widened: [k][NV][16] f32.
template <int NV>
struct Panel : PackedF32 {
    static constexpr int STRIDE = NV * LINE_BYTES;
    static constexpr bool PREFETCH = false;
};
template <class Format>
struct Packed : Format {
    static constexpr int STRIDE = GROUP_BYTES;
    static constexpr bool PREFETCH = true;
};

// acc[m][v] += x[m][0..count) * w[0..count)[v], k ascending. `x(m)` is row m of the tile, `w` points at the first group's
// line of the first vector.
template <class Source, class Tile, int MR, int NV>
PLANC_INLINE void accumulate(Vec (&acc)[MR][NV], const Tile& x, const char* w, int count) {
    constexpr int GROUP = Source::GROUP;
    auto step = [&](auto i, int k, const char* wk) PLANC_INLINED {
        Vec b[NV];
        PLANC_UNROLL for (int v = 0; v < NV; ++v) b[v] = Source::template unpack<i.value>(wk + v * LINE_BYTES);
        PLANC_UNROLL for (int m = 0; m < MR; ++m) {
            Vec a = broadcast(x(m) + k + i.value);
            PLANC_UNROLL for (int v = 0; v < NV; ++v) acc[m][v] = fma(a, b[v], acc[m][v]);
        }
    };
    int k = 0;
    for (; k + GROUP <= count; k += GROUP, w += Source::STRIDE) {
        if constexpr (Source::PREFETCH) {
            PLANC_UNROLL for (int v = 0; v < NV; ++v) prefetch(w + PREFETCH_BYTES + v * LINE_BYTES);
        }
        unrolled<GROUP>([&](auto i) PLANC_INLINED { step(i, k, w); });
    }
    if constexpr (GROUP > 1) {
        unrolled<GROUP - 1>([&](auto i) PLANC_INLINED {
            if (k + i.value < count) step(i, k, w);
        });
    }
}

}  // namespace detail

// Rows of x that lie LDX floats apart, and rows of y that lie LDY apart.
template <int LDX, int LDY>
class DenseRows {
    struct Tile {
        const float* x;
        PLANC_INLINE const float* operator()(int m) const { return x + m * LDX; }
    };

   public:
    DenseRows(const float* x, float* y) : x_(x), y_(y) {}

    // The MR rows of x from `row` on, at k.
    template <int MR>
    PLANC_INLINE Tile tile(int row, int k) const {
        return {x_ + int64_t(row) * LDX + k};
    }
    PLANC_INLINE float* result(int row) const { return y_ + int64_t(row) * LDY; }

   private:
    const float* const x_;
    float* const y_;
};

// One weight over rows that `Rows` finds, in register tiles. Config: Format (PackedF32, PackedBf16 or PackedI8), N, K, BIAS.
template <class Config, class Rows>
class LinearTiles {
    using Format = typename Config::Format;
    static constexpr int N = Config::N, K = Config::K;
    static constexpr bool BIAS = Config::BIAS;

   public:
    static constexpr int PANEL_COLUMNS = PANEL_VECS * LANES;

    // weight packed, scale f32 [N] for int8, bias f32 [N].
    LinearTiles(Rows rows, const char* weight, const float* scale, const float* bias)
        : rows_(rows), weight_(weight), scale_(scale), bias_(bias) {}

    // Few rows: widen weights in registers; a 64-column block streams through the cache once for all row tiles.
    void run_direct(int rows, Range half_blocks) const {
        const int tiles = (rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
        for (int half = half_blocks.begin; half < half_blocks.end;) {
            const bool whole = half % 2 == 0 && half + 2 <= half_blocks.end;
            run_columns(rows, tiles, half * 32, whole ? 4 : 2);
            half += whole ? 2 : 1;
        }
    }

    // Many rows, PANEL_ROWS at most: k blocks outside, so that x stays in the cache.
    void run_panels(Range rows, Range columns) const {
        for (int k = 0; k < K; k += detail::PANEL_K) {
            for (int c = columns.begin; c < columns.end; ++c) run_panel(rows, c * PANEL_COLUMNS, k);
        }
    }

   private:
    void run_columns(int rows, int tiles, int column, int vecs) const {
        switch (tile_vecs((rows + tiles - 1) / tiles)) {
            case 4:
                if (vecs == 4) return run_tiles<4>(rows, tiles, column, 1);
                return run_tiles<2>(rows, tiles, column, 1);
            case 2:
                return run_tiles<2>(rows, tiles, column, vecs / 2);
            default:
                return run_tiles<1>(rows, tiles, column, vecs);
        }
    }

    // `count` column tiles of NV vectors, each for all row tiles while its lines are in the cache.
    template <int NV>
    void run_tiles(int rows, int tiles, int column, int count) const {
        for (int i = 0; i < count; ++i, column += NV * LANES) {
            for (int tile = 0; tile < tiles; ++tile) {
                direct_rows<NV>(share(rows, tile, tiles), column);
            }
        }
    }

    template <int NV>
    void direct_rows(Range rows, int column) const {
        const char* w = weight_ + block_offset<Format>(column / BLOCK, K) + column % BLOCK / LANES * LINE_BYTES;
        with_rows<NV>(rows.end - rows.begin, [&](auto mr) PLANC_INLINED {
            Vec acc[mr.value][NV] = {};
            detail::accumulate<detail::Packed<Format>>(acc, rows_.template tile<mr.value>(rows.begin, 0), w, K);
            finish(acc, column);
            store_tile(acc, rows.begin, column);
        });
    }

    void run_panel(Range rows, int column, int k) const {
        alignas(64) float panel[detail::PANEL_K * PANEL_COLUMNS];
        const int count = std::min(detail::PANEL_K, K - k);
        unpack(panel, column, k, count);
        const int tiles = (rows.end - rows.begin + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
        for (int tile = 0; tile < tiles; ++tile) {
            const Range part = share(rows.end - rows.begin, tile, tiles);
            panel_rows({rows.begin + part.begin, rows.begin + part.end}, column, k, count, reinterpret_cast<const char*>(panel));
        }
    }

    void panel_rows(Range rows, int column, int k, int count, const char* panel) const {
        with_rows<PANEL_VECS>(rows.end - rows.begin, [&](auto mr) PLANC_INLINED {
            Vec acc[mr.value][PANEL_VECS] = {};
            if (k > 0) load_tile(acc, rows.begin, column);
            detail::accumulate<detail::Panel<PANEL_VECS>>(acc, rows_.template tile<mr.value>(rows.begin, k), panel, count);
            if (k + count == K) finish(acc, column);
            store_tile(acc, rows.begin, column);
        });
    }

    // Widens k..k+count of the panel's columns; the last group is whole, as the packing pads it.
    void unpack(float* panel, int column, int k, int count) const {
        static_assert(detail::PANEL_K % Format::GROUP == 0);
        const char* w = weight_ + block_offset<Format>(column / BLOCK, K) + column % BLOCK / LANES * LINE_BYTES;
        w += int64_t(k / Format::GROUP) * GROUP_BYTES;
        for (int i = 0; i < count; i += Format::GROUP, w += GROUP_BYTES) {
            prefetch(w + detail::PREFETCH_BYTES);
            unrolled<Format::GROUP>([&](auto g) PLANC_INLINED {
                for (int v = 0; v < PANEL_VECS; ++v) {
                    store(panel + ((i + g.value) * PANEL_VECS + v) * LANES, Format::template unpack<g.value>(w + v * LINE_BYTES));
                }
            });
        }
    }

    // Calls body(integral_constant<int, rows>) for 1 <= rows <= MAX_ROWS that leave the accumulators in registers.
    template <int NV, class Body>
    PLANC_INLINE void with_rows(int rows, Body body) const {
        unrolled<MAX_TILE_ROWS>([&](auto i) PLANC_INLINED {
            if constexpr ((i.value + 1) * NV <= TILE_ACCUMULATORS) {
                if (rows == i.value + 1) body(std::integral_constant<int, i.value + 1>{});
            }
        });
    }

    template <int MR, int NV>
    PLANC_INLINE void finish(Vec (&acc)[MR][NV], int column) const {
        PLANC_UNROLL for (int v = 0; v < NV; ++v) {
            const int c = column + v * LANES, valid = std::min(N - c, LANES);
            if (valid <= 0) continue;
            const Vec scale = Format::SCALED ? load(scale_ + c, valid) : zero();
            const Vec bias = BIAS ? load(bias_ + c, valid) : zero();
            PLANC_UNROLL for (int m = 0; m < MR; ++m) {
                if constexpr (Format::SCALED) acc[m][v] = acc[m][v] * splat(Format::UNIT) * scale;
                if constexpr (BIAS) acc[m][v] = acc[m][v] + bias;
            }
        }
    }

    template <int MR, int NV>
    PLANC_INLINE void store_tile(const Vec (&acc)[MR][NV], int row, int column) const {
        visit_tile<MR, NV>(row, column, [&](float* y, int m, int v) PLANC_INLINED { store(y, acc[m][v]); },
                           [&](float* y, int m, int v, int valid) PLANC_INLINED { store(y, acc[m][v], valid); });
    }

    template <int MR, int NV>
    PLANC_INLINE void load_tile(Vec (&acc)[MR][NV], int row, int column) const {
        visit_tile<MR, NV>(row, column, [&](float* y, int m, int v) PLANC_INLINED { acc[m][v] = load(y); },
                           [&](float* y, int m, int v, int valid) PLANC_INLINED { acc[m][v] = valid > 0 ? load(y, valid) : zero(); });
    }

    // whole(y, m, v) for vectors inside N, part(y, m, v, valid) for the one that N cuts (none beyond it).
    template <int MR, int NV, class Whole, class Part>
    PLANC_INLINE void visit_tile(int row, int column, Whole whole, Part part) const {
        PLANC_UNROLL for (int m = 0; m < MR; ++m) {
            float* y = rows_.result(row + m) + column;
            PLANC_UNROLL for (int v = 0; v < NV; ++v) {
                const int valid = N - column - v * LANES;
                if (N % LANES == 0 ? valid > 0 : valid >= LANES) {
                    whole(y + v * LANES, m, v);
                } else if (valid > 0) {
                    part(y + v * LANES, m, v, valid);
                }
            }
        }
    }

    const Rows rows_;
    const char* const weight_;
    const float* const scale_;
    const float* const bias_;
};

// Config: that of LinearTiles, X_STRIDE (floats between rows of x; y is dense). x and y must not overlap.
template <class Config>
class Linear {
    static constexpr int N = Config::N;
    static constexpr int HALF_BLOCKS = (N + 31) / 32;  // a finer share than whole blocks, and still two lines long
    using Rows = DenseRows<Config::X_STRIDE, N>;
    using Tiles = LinearTiles<Config, Rows>;
    static constexpr int PANELS = (N + Tiles::PANEL_COLUMNS - 1) / Tiles::PANEL_COLUMNS;

   public:
    // x f32 [rows, K], weight packed, scale f32 [N] for int8, bias f32 [N], y f32 [rows, N].
    Linear(const float* x, const void* weight, const float* scale, const float* bias, float* y)
        : tiles_({x, y}, static_cast<const char*>(weight), scale, bias) {}

    void run(int rows, int thread, int threads) const {
        if (rows < detail::PANEL_MIN_ROWS) {
            tiles_.run_direct(rows, share(HALF_BLOCKS, thread, threads));
        } else {
            run_panels(rows, thread, threads);
        }
    }

   private:
    // Units of (row chunk, panel column) in contiguous shares.
    void run_panels(int rows, int thread, int threads) const {
        const int chunks = (rows + detail::PANEL_ROWS - 1) / detail::PANEL_ROWS;
        const Range units = share(int64_t(chunks) * PANELS, thread, threads);
        for (int unit = units.begin; unit < units.end;) {
            const int chunk = unit / PANELS;
            const int end = std::min(units.end, (chunk + 1) * PANELS);
            tiles_.run_panels(share(rows, chunk, chunks), {unit % PANELS, end - chunk * PANELS});
            unit = end;
        }
    }

    const Tiles tiles_;
};

}  // namespace planc
