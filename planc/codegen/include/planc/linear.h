// y[M, N] = x[M, K] @ W^T (+ bias) over packed weights, W in f32, bf16 or codes with scales.
//
// Every y has one accumulator that meets k = 0, 1, .. K-1 in order by fused multiply-add; tile shapes, threads and the
// number of rows decide where that happens and never change a bit. Where groups of k have a scale each, a group has an
// accumulator of its own, which its scale adds to that of y. Codes times codes are summed as integers, exactly. Targets that
// multiply pairs of bf16 (+bf16) round x to them and add a pair at once, in the order of their instruction; weights in bf16
// and f8 are exact in bf16. Where bytes are multiplied (+vnni, +avxvnni), whole numbers meet x in two digits of a byte, and
// what both sum to exactly is added to y for each group, or each panel's k. Partial sums wait in y between two blocks of k:
// an f32 store and load is exact.
#pragma once
#include <algorithm>

#include "planc/linear_forms.h"
#include "planc/linear_sums.h"

namespace planc {

// One weight over rows that `Rows` finds, in register tiles. Config: Format (of weights.h), N, K, BIAS, what blocking.h names;
// maybe Scale, the elements of scales; and maybe Gate: y then has N / 2 columns, the Gate of a column of the first half and
// of its like in the second.
template <class Config, class Rows>
class LinearTiles {
    using Format = typename Config::Format;
    using Scale = typename LinearWeights<Config>::Scale;
    using Gate = detail::GateOf<Config>;
    static constexpr bool GATED = Gate::GATED;
    static constexpr int N = Config::N, K = Config::K, SCALE_K = Format::SCALE_K;
    static constexpr int COLUMNS = Gate::COLUMNS;
    static_assert(!GATED || N % (2 * BLOCK) == 0, "halves begin with a block of the packed weight");
    using Form = detail::FormOf<Format>;
    static constexpr int PANEL_K = detail::panel_k(K, detail::most_k<Config, Form>(), SCALE_K == 0 ? LANES : SCALE_K);
    static_assert(SCALE_K <= detail::PANEL_UNIT);
    static constexpr bool DIGITS = std::is_same_v<Form, AsDigits>;
    static constexpr int ACCUMULATORS = DIGITS ? DIGIT_ACCUMULATORS : TILE_ACCUMULATORS;  // each of which has two digits then
    static constexpr int TILE_ROWS = std::min({detail::tile_rows<Config, Form>(), MAX_TILE_ROWS, ACCUMULATORS});
    static constexpr int PANEL_TILE_ROWS = std::min(TILE_ROWS, ACCUMULATORS / PANEL_VECS);
    static constexpr bool BIAS = Config::BIAS;
    static constexpr bool BY_GROUP = Format::INTEGERS && SCALE_K > 0;  // rows have scales by group, too
    // Whether zero points are taken off sums, not codes.
    static constexpr bool ZEROS_LATER = Format::ZEROS && !Format::INTEGERS;
    // Whether the packed lines are a panel already.
    static constexpr bool IN_PLACE = Form::DOTS && Format::LINES_ARE_DOTS && PANEL_VECS * LANES == BLOCK;
    // Floats that a panel keeps of a group of k, where its scales are no f32.
    static constexpr int WIDENED = SCALE_K == 0 || std::is_same_v<Scale, float> ? 0 : detail::PANEL_COLUMNS * (ZEROS_LATER ? 2 : 1);
    using PackedSource = detail::Packed<Format>;
    using UnpackedSource = typename detail::PanelOf<Form, PANEL_VECS>::Source;
    using PanelSource = std::conditional_t<IN_PLACE, detail::Packed<Format, false>, UnpackedSource>;

   public:
    static constexpr int PANEL_COLUMNS = detail::PANEL_COLUMNS;
    static constexpr int PANELS = (COLUMNS + PANEL_COLUMNS - 1) / PANEL_COLUMNS;
    static constexpr int HALF_BLOCKS = (COLUMNS + 31) / 32;  // a finer share than whole blocks, and still two lines long
    static constexpr int PANEL_FROM = detail::panel_from<Config, Form>();
    static constexpr int CHUNK_ROWS = detail::chunk_rows<Config>();
    // Rows that `run_whole` takes at most: where k is cut, as many as stay in the L2 cache in two bytes an element.
    static constexpr int WHOLE_ROWS = K <= PANEL_K ? CHUNK_ROWS : std::max(PANEL_FROM - 1, std::min(CHUNK_ROWS, (256 << 10) / K));

    LinearTiles(Rows rows, LinearWeights<Config> weights) : rows_(rows), from_(weights) {}

    // Few rows: widen weights in registers; a 64-column block streams through the cache once for all row tiles.
    void run_direct(int rows, Range half_blocks) {
        if (half_blocks.begin == half_blocks.end) return;
        rows_.template prepare<false>({0, rows}, 0, K);
        const Sums sums({0, rows}, half_blocks.begin * 32, (half_blocks.end - half_blocks.begin) * 32);
        run_blocks(rows, half_blocks, 0, sums);
        if constexpr (GATED) run_blocks(rows, half_blocks, COLUMNS, sums);
    }

    // Many rows, CHUNK_ROWS at most: k blocks outside, so that x stays in the cache.
    void run_panels(Range rows, Range panels) {
        const Sums all(rows, panels.begin * PANEL_COLUMNS, (panels.end - panels.begin) * PANEL_COLUMNS);
        for (int k = 0; k < K; k += PANEL_K) {
            rows_.template prepare<true>(rows, k, std::min(PANEL_K, K - k));
            for (int c = panels.begin; c < panels.end; ++c) {
                const int column = c * PANEL_COLUMNS;
                const Sums sums = K > PANEL_K ? all : Sums(rows, column, PANEL_COLUMNS);
                run_panel(rows, column, k, sums);
                if constexpr (GATED) run_panel(rows, COLUMNS + column, k, sums);
            }
        }
    }

    // The same with k inside, of rows that look at results: no sum waits longer than for its panel.
    void run_whole(int rows, Range panels) {
        rows_.template prepare<false>({0, rows}, 0, K);
        for (int c = panels.begin; c < panels.end; ++c) {
            const Sums sums({0, rows}, c * PANEL_COLUMNS, PANEL_COLUMNS);
            for (int k = 0; k < K; k += PANEL_K) run_panel({0, rows}, c * PANEL_COLUMNS, k, sums);
        }
    }

   private:
    static constexpr bool SUMS_APART = GATED || Rows::BEST;  // sums that wait do so in memory of this thread's own, not in y

    // Where sums wait that a Gate joins: those of `width` columns from `first` on in the first half until the second half's
    // are there, and where k is cut those of both until the last k.
    class Sums {
       public:
        Sums(Range rows, int first, int width) : row_(rows.begin), first_(first), width_(width) {
            const size_t count = size_t(rows.end - rows.begin) * size_t(2 * width);
            if constexpr (SUMS_APART) floats_ = detail::thread_floats<detail::For::SUMS>(count);
        }
        PLANC_INLINE float* at(int row, int column) const {
            return floats_ + int64_t(row - row_) * 2 * width_ + (GATED && column >= COLUMNS ? column - COLUMNS + width_ : column) - first_;
        }

       private:
        int row_, first_, width_;
        float* floats_ = nullptr;
    };

    void run_blocks(int rows, Range half_blocks, int from, const Sums& sums) const {
        const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
        for (int half = half_blocks.begin; half < half_blocks.end;) {
            const bool whole = half % 2 == 0 && half + 2 <= half_blocks.end;
            run_columns(rows, tiles, from + half * 32, whole ? 4 : 2, sums);
            half += whole ? 2 : 1;
        }
    }

    void run_columns(int rows, int tiles, int column, int vecs, const Sums& sums) const {
        switch (tile_vecs((rows + tiles - 1) / tiles, ACCUMULATORS)) {
            case 4:
                if (vecs == 4) return run_tiles<4>(rows, tiles, column, 1, sums);
                return run_tiles<2>(rows, tiles, column, 1, sums);
            case 2:
                return run_tiles<2>(rows, tiles, column, vecs / 2, sums);
            default:
                return run_tiles<1>(rows, tiles, column, vecs, sums);
        }
    }

    // `count` column tiles of NV vectors, each for all row tiles while its lines are in the cache.
    template <int NV>
    void run_tiles(int rows, int tiles, int column, int count, const Sums& sums) const {
        for (int i = 0; i < count; ++i, column += NV * LANES) {
            for (int tile = 0; tile < tiles; ++tile) {
                direct_rows<NV>(share(rows, tile, tiles), column, sums);
            }
        }
    }

    template <int NV>
    void direct_rows(Range rows, int column, const Sums& sums) const {
        with_rows<NV>(rows.end - rows.begin, [&](auto mr) PLANC_INLINED {
            Vec acc[mr.value][NV] = {};
            add_products<PackedSource, false>(acc, rows.begin, column, 0, K, lines(column, 0), nullptr);
            finish(acc, rows.begin, column);
            put(acc, rows.begin, column, sums);
        });
    }

    // The line of 16 columns from `column` on that begins with k.
    PLANC_INLINE const char* lines(int column, int k) const {
        return from_.weight + block_offset<Format>(column / BLOCK, K) + column % BLOCK / LANES * LINE_BYTES + int64_t(k / Format::GROUP) * GROUP_BYTES;
    }

    // acc += x * w over k..k+count, whose scales and zero points a panel may have as `widened`.
    template <class Source, bool PANEL, int MR, int NV>
    PLANC_INLINE void add_products(Vec (&acc)[MR][NV], int row, int column, int k, int count, const char* w, const float* widened) const {
        if constexpr (DIGITS) {
            add_digits<Source, PANEL>(acc, row, column, k, count, w, widened);
        } else if constexpr (SCALE_K == 0) {
            const auto x = rows_.template tile<MR, (PANEL && !Rows::BEST)>(row, k);
            Source source[NV];
            if constexpr (Format::INTEGERS) {
                PLANC_UNROLL for (int m = 0; m < MR && (k == 0 || !Rows::BEST); ++m) {
                    PLANC_UNROLL for (int v = 0; v < NV; ++v) acc[m][v] = as_float(as_int(acc[m][v]) + x.first(m));
                }
            }
            add_lines(acc, x, w, count, source);
        } else {
            for (const int end = k + count; k < end; k += SCALE_K, w += SCALE_K / Source::GROUP * Source::STRIDE, widened += PANEL ? WIDENED : 0) {
                const auto x = rows_.template tile<MR, (PANEL && !Rows::BEST)>(row, k);
                Vec part[MR][NV] = {};
                Source source[NV];
                PLANC_UNROLL for (int v = 0; v < NV; ++v) take_zeros(source[v], column + v * LANES, k);
                if constexpr (BY_GROUP) {
                    PLANC_UNROLL for (int m = 0; m < MR; ++m) {
                        PLANC_UNROLL for (int v = 0; v < NV; ++v) part[m][v] = as_float(x.first(m));
                    }
                }
                add_lines(part, x, w, std::min(SCALE_K, end - k), source);
                add_scaled<PANEL>(acc, part, row, column, k, widened);
            }
        }
    }

    template <class Source, bool PANEL, int MR, int NV>
    PLANC_INLINE void add_digits(Vec (&acc)[MR][NV], int row, int column, int k, int count, const char* w, const float* widened) const {
        constexpr int SUM_K = Rows::SUM_K;
        static_assert(SCALE_K > 0 || !PANEL || PANEL_K == detail::panel_k(K, AsDigits::MOST_K, LANES), "sums of digits are those of a panel");
        for (const int end = k + count; k < end; k += SUM_K, w += SUM_K / Source::GROUP * Source::STRIDE, widened += PANEL ? WIDENED : 0) {
            const auto x = rows_.template tile<MR, (PANEL && !Rows::BEST)>(row, k);
            Vec part[2][MR][NV];
            PLANC_UNROLL for (int m = 0; m < MR; ++m) {
                PLANC_UNROLL for (int v = 0; v < NV; ++v) {
                    part[0][m][v] = Format::ZEROS ? zero() : as_float(x.template first<0>(m));
                    part[1][m][v] = Format::ZEROS ? zero() : as_float(x.template first<1>(m));
                }
            }
            const Source source[NV] = {};
            detail::accumulate_digits(part, x, w, std::min(SUM_K, end - k), source);
            auto joined = [](VecI one, VecI two) PLANC_INLINED { return fma(to_float(two), splat(AsDigits::SECOND), to_float(one)); };
            [[maybe_unused]] Vec sum_of_x[MR];
            if constexpr (Format::ZEROS) {
                PLANC_UNROLL for (int m = 0; m < MR; ++m) sum_of_x[m] = joined(x.template first<0>(m), x.template first<1>(m));
            }
            PLANC_UNROLL for (int v = 0; v < NV; ++v) {
                [[maybe_unused]] Vec scale, zeros;
                if constexpr (SCALE_K > 0) scale = of_group<PANEL>(widened, v, from_.scale, column + v * LANES, k);
                if constexpr (Format::ZEROS) zeros = of_group<PANEL>(widened, PANEL_VECS + v, from_.zeros, column + v * LANES, k);
                PLANC_UNROLL for (int m = 0; m < MR; ++m) {
                    Vec sum = joined(as_int(part[0][m][v]), as_int(part[1][m][v]));
                    if constexpr (Format::ZEROS) sum = sum - sum_of_x[m] * zeros;
                    acc[m][v] = SCALE_K == 0 ? acc[m][v] + sum : fma(sum * splat(Format::BYTE_UNIT), scale, acc[m][v]);
                }
            }
        }
    }

    template <class Source, class Tile, int MR, int NV>
    static PLANC_INLINE void add_lines(Vec (&acc)[MR][NV], const Tile& x, const char* w, int count, const Source (&source)[NV]) {
        if constexpr (Form::DOTS) {
            detail::accumulate_dots<Form>(acc, x, w, count, source);
        } else {
            detail::accumulate(acc, x, w, count, source);
        }
    }

    // acc += part * the scales of k's group.
    template <bool PANEL, int MR, int NV>
    PLANC_INLINE void add_scaled(Vec (&acc)[MR][NV], const Vec (&part)[MR][NV], int row, int column, int k, const float* widened) const {
        PLANC_UNROLL for (int v = 0; v < NV; ++v) {
            const Vec scale = of_group<PANEL>(widened, v, from_.scale, column + v * LANES, k);
            PLANC_UNROLL for (int m = 0; m < MR; ++m) {
                if constexpr (BY_GROUP) {
                    acc[m][v] = fma(to_float(as_int(part[m][v])) * scale, splat(rows_.scale(row + m, k / SCALE_K)), acc[m][v]);
                } else {
                    acc[m][v] = fma(part[m][v] * splat(Format::UNIT), scale, acc[m][v]);
                }
            }
        }
    }

    template <class Source>
    PLANC_INLINE void take_zeros(Source& source, int column, int k) const {
        if constexpr (Source::ZEROS) source.take_zeros(of_group(from_.zeros, column, k));
    }

    // Sixteen columns of k's group in values [K/SCALE_K, N]; zeros beyond N.
    PLANC_INLINE Vec of_group(const Scale* values, int column, int k) const {
        const int valid = N - column;
        const Scale* p = values + int64_t(k / SCALE_K) * N + column;
        if (N % LANES == 0 ? valid > 0 : valid >= LANES) return load_as_float(p);
        return valid > 0 ? load_as_float(p, valid) : zero();
    }

    // The same, which a panel has as its vector `i` of the group.
    template <bool PANEL>
    PLANC_INLINE Vec of_group(const float* widened, int i, const Scale* values, int column, int k) const {
        if constexpr (PANEL && WIDENED > 0) return load(widened + i * LANES);
        return of_group(values, column, k);
    }

    // Scales, and zero points, of the panel's groups as f32.
    void widen_scales(float* to, int column, int k, int count) const {
        for (const int end = k + count; k < end; k += SCALE_K + !SCALE_K, to += WIDENED) {
            for (int v = 0; v < PANEL_VECS; ++v) {
                store(to + v * LANES, of_group(from_.scale, column + v * LANES, k));
                if constexpr (ZEROS_LATER) store(to + PANEL_COLUMNS + v * LANES, of_group(from_.zeros, column + v * LANES, k));
            }
        }
    }

    void run_panel(Range rows, int column, int k, const Sums& sums) const {
        alignas(64) float widened[WIDENED == 0 ? 1 : PANEL_K / (SCALE_K + !SCALE_K) * WIDENED];
        alignas(64) char unpacked[IN_PLACE ? 1 : PANEL_K / UnpackedSource::GROUP * UnpackedSource::STRIDE];
        const int count = std::min(PANEL_K, K - k);
        if constexpr (!IN_PLACE) unpack(unpacked, column, k, count);
        if constexpr (WIDENED > 0) widen_scales(widened, column, k, count);
        const char* const panel = IN_PLACE ? lines(column, k) : unpacked;
        const int tiles = (rows.end - rows.begin + PANEL_TILE_ROWS - 1) / PANEL_TILE_ROWS;
        for (int tile = 0; tile < tiles; ++tile) {
            const Range part = share(rows.end - rows.begin, tile, tiles);
            panel_rows({rows.begin + part.begin, rows.begin + part.end}, column, k, count, panel, widened, sums);
        }
    }

    void panel_rows(Range rows, int column, int k, int count, const char* panel, const float* widened, const Sums& sums) const {
        with_rows<PANEL_VECS>(rows.end - rows.begin, [&](auto mr) PLANC_INLINED {
            Vec acc[mr.value][PANEL_VECS] = {};
            if (k > 0) take(acc, rows.begin, column, sums);
            add_products<PanelSource, true>(acc, rows.begin, column, k, count, panel, widened);
            if (k + count == K) {
                finish(acc, rows.begin, column);
                put(acc, rows.begin, column, sums);
            } else {
                keep(acc, rows.begin, column, sums);
            }
        });
    }

    // Sums that wait: in y, or where a Gate finds them.
    template <int MR, int NV>
    PLANC_INLINE void keep(const Vec (&acc)[MR][NV], int row, int column, const Sums& sums) const {
        if constexpr (SUMS_APART) {
            each_sum<MR, NV>(sums, row, column, [&](float* sum, int m, int v) PLANC_INLINED { store(sum, acc[m][v]); });
        } else {
            store_tile(acc, row, column);
        }
    }

    // Goes on with what an earlier k has kept.
    template <int MR, int NV>
    PLANC_INLINE void take(Vec (&acc)[MR][NV], int row, int column, const Sums& sums) const {
        if constexpr (SUMS_APART) {
            each_sum<MR, NV>(sums, row, column, [&](float* sum, int m, int v) PLANC_INLINED { acc[m][v] = load(sum); });
        } else {
            load_tile(acc, row, column);
        }
    }

    // Finished columns: to y, where a Gate has both that it joins.
    template <int MR, int NV>
    PLANC_INLINE void put(Vec (&acc)[MR][NV], int row, int column, const Sums& sums) const {
        if constexpr (Rows::BEST) {
            PLANC_UNROLL for (int m = 0; m < MR; ++m) {
                PLANC_UNROLL for (int v = 0; v < NV; ++v) rows_.see(row + m, column + v * LANES, acc[m][v], COLUMNS - column - v * LANES);
            }
        } else if (!GATED || column < COLUMNS) {
            keep(acc, row, column, sums);
        } else if constexpr (GATED) {
            each_sum<MR, NV>(sums, row, column - COLUMNS, [&](float* gate, int m, int v) PLANC_INLINED {
                acc[m][v] = Gate::apply(load(gate), acc[m][v]);
            });
            store_tile(acc, row, column - COLUMNS);
        }
    }

    template <int MR, int NV, class Body>
    static PLANC_INLINE void each_sum(const Sums& sums, int row, int column, Body body) {
        PLANC_UNROLL for (int m = 0; m < MR; ++m) {
            float* at = sums.at(row + m, column);
            PLANC_UNROLL for (int v = 0; v < NV; ++v) body(at + v * LANES, m, v);
        }
    }

    // Widens k..k+count of the panel's columns; the last group is whole, as the packing pads it.
    void unpack(char* panel, int column, int k, int count) const {
        static_assert(PANEL_K % Format::GROUP == 0);
        const char* w = lines(column, k);
        for (int i = 0; i < count; i += Format::GROUP, w += GROUP_BYTES, panel += Format::GROUP / PanelSource::GROUP * PanelSource::STRIDE) {
            prefetch(w + detail::PREFETCH_BYTES);
            unpack_group(panel, w, column, k + i);
        }
    }

    PLANC_INLINE void unpack_group(char* panel, const char* w, int column, int k) const {
        for (int v = 0; v < PANEL_VECS; ++v) {
            const char* line = w + v * LINE_BYTES;
            PackedSource source;
            if constexpr (!Form::DOTS || Format::INTEGERS) take_zeros(source, column + v * LANES, k);
            auto to = [&](int step) PLANC_INLINED { return panel + (step * PANEL_VECS + v) * LINE_BYTES; };
            if constexpr (Form::DOTS) {
                unrolled<Format::GROUP / UnpackedSource::GROUP * Form::STEPS>([&](auto p) PLANC_INLINED {
                    store_int(to(p.value), source.template dots<p.value>(line));
                });
            } else {
                unrolled<Format::GROUP>([&](auto g) PLANC_INLINED {
                    store(reinterpret_cast<float*>(to(g.value)), source.template unpack<g.value>(line));
                });
            }
        }
    }

    // Calls body(integral_constant<int, rows>) for 1 <= rows <= TILE_ROWS that leave the accumulators in registers.
    template <int NV, class Body>
    PLANC_INLINE void with_rows(int rows, Body body) const {
        unrolled<TILE_ROWS>([&](auto i) PLANC_INLINED {
            if constexpr ((i.value + 1) * NV <= ACCUMULATORS) {
                if (rows == i.value + 1) body(std::integral_constant<int, i.value + 1>{});
            }
        });
    }

    template <int MR, int NV>
    PLANC_INLINE void finish(Vec (&acc)[MR][NV], int row, int column) const {
        PLANC_UNROLL for (int v = 0; v < NV; ++v) {
            const int c = column + v * LANES, valid = std::min(N - c, LANES);
            if (valid <= 0) continue;
            const Vec scale = Format::SCALED && SCALE_K == 0 ? load_as_float(from_.scale + c, valid) : zero();
            const Vec bias = BIAS ? load(from_.bias + c, valid) : zero();
            PLANC_UNROLL for (int m = 0; m < MR; ++m) {
                acc[m][v] = scaled(acc[m][v], row + m, scale);
                if constexpr (BIAS) acc[m][v] = acc[m][v] + bias;
            }
        }
    }

    // A finished sum times the scales that it lacks: that of its column, that of its row.
    PLANC_INLINE Vec scaled(Vec sum, int row, Vec column_scale) const {
        if constexpr (BY_GROUP) return sum;
        if constexpr (Format::INTEGERS) sum = to_float(as_int(sum));
        if constexpr (SCALE_K == 0 && Format::SCALED && Rows::SCALED) {
            return sum * splat(DIGITS ? Format::BYTE_UNIT : Format::UNIT) * (splat(rows_.scale(row)) * column_scale);
        } else if constexpr (SCALE_K == 0 && Format::SCALED) {
            return sum * splat(Format::UNIT) * column_scale;
        } else if constexpr (Rows::SCALED) {
            return sum * splat(rows_.scale(row));
        } else {
            return sum;
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

    // whole(y, m, v) for vectors inside y, part(y, m, v, valid) for the one that its end cuts (none beyond it).
    template <int MR, int NV, class Whole, class Part>
    PLANC_INLINE void visit_tile(int row, int column, Whole whole, Part part) const {
        PLANC_UNROLL for (int m = 0; m < MR; ++m) {
            float* y = rows_.result(row + m) + column;
            PLANC_UNROLL for (int v = 0; v < NV; ++v) {
                const int valid = COLUMNS - column - v * LANES;
                if (COLUMNS % LANES == 0 ? valid > 0 : valid >= LANES) {
                    whole(y + v * LANES, m, v);
                } else if (valid > 0) {
                    part(y + v * LANES, m, v, valid);
                }
            }
        }
    }

    Rows rows_;
    const LinearWeights<Config> from_;
};

// Config: that of LinearTiles, X_STRIDE (elements between rows of x; y is dense). x and y must not overlap.
template <class Config>
class Linear {
    using Format = typename Config::Format;
    static constexpr int ROW_SCALES = Format::INTEGERS && Format::SCALE_K ? Config::K / (Format::SCALE_K + !Format::SCALE_K) : 1;

   public:
    using X = typename Format::X;
    using Dense = DenseRows<X, Config::X_STRIDE, detail::GateOf<Config>::COLUMNS, ROW_SCALES>;

   private:
    using Rows = detail::RowsOf<Dense, Config>;
    using Tiles = LinearTiles<Config, Rows>;
    static constexpr int PANELS = Tiles::PANELS;

   public:
    // x [rows, K], its scales f32 [rows] or [rows, K/SCALE_K] where x is codes, y f32 [rows, N], or [rows, N / 2] with a Gate.
    Linear(const X* x, const float* x_scale, LinearWeights<Config> weights, float* y) : tiles_(Rows({x, x_scale, y}), weights) {}

    void run(int rows, int thread, int threads) {
        if (rows < Tiles::PANEL_FROM) {
            tiles_.run_direct(rows, share(Tiles::HALF_BLOCKS, thread, threads));
        } else {
            run_panels(rows, thread, threads);
        }
    }

   private:
    // Units of (row chunk, panel column) in contiguous shares, which are equal where chunks stay large enough for that.
    void run_panels(int rows, int thread, int threads) {
        const int least = (rows + Tiles::CHUNK_ROWS - 1) / Tiles::CHUNK_ROWS, even = (least + threads - 1) / threads * threads;
        const int chunks = rows / even >= Tiles::CHUNK_ROWS / 2 ? even : least;
        const Range units = share(int64_t(chunks) * PANELS, thread, threads);
        for (int unit = units.begin; unit < units.end;) {
            const int chunk = unit / PANELS;
            const int end = std::min(units.end, (chunk + 1) * PANELS);
            tiles_.run_panels(share(rows, chunk, chunks), {unit % PANELS, end - chunk * PANELS});
            unit = end;
        }
    }

    Tiles tiles_;
};

}  // namespace planc
