// Rows that a linear layer multiplies: f32 where it lies, or in the thread's own memory as its products take them.
//
// A base says where row r of x begins (`x`), its scale (`scale`) and where its result goes (`result`). KeptRows gives a tile
// of rows as the kernels read them, from element k on; `prepare` comes first, for the rows and k that the tiles will cover.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "planc/dots.h"
#include "planc/narrow.h"
#include "planc/share.h"

namespace planc {

namespace detail {
// k of an unpacked panel of 16 columns, a multiple of `unit`: in equal parts, of which one takes no more than 20 KB as f32
// and 16 KB as pairs, so that it stays in the L1 cache beside a tile of rows.
constexpr int PANEL_UNIT = 128;  // the largest
constexpr int panel_k(int k, int most, int unit) {
    const int parts = (k + most - 1) / most, each = (k + parts - 1) / parts;
    return (each + unit - 1) / unit * unit;
}
// Floats from one section of `k` elements to the next: whole vectors, and a line more, as a power of two would put all rows
// into one set of the cache.
constexpr int apart(int k, int per_float) { return (k + 63) / 64 * 64 / per_float + LANES; }

// Floats of this thread's own, for the rows of one kernel at a time: KEPT as a product takes them, its sums, the best of them.
enum class For { KEPT, SUMS, BEST };
template <For WHAT = For::KEPT>
float* thread_floats(size_t count) {
    static thread_local std::vector<float> memory;
    if (memory.size() < count) memory.resize(count);
    return memory.data();
}

template <bool IN_TURN>
PLANC_INLINE VecI maybe_in_turn(VecI bytes) {
    if constexpr (IN_TURN) return bytes_in_turn(bytes);
    return bytes;
}

// Calls body(i, 4 * LANES elements of x from i on): zeros behind its end.
template <class X, class Body>
PLANC_INLINE void for_each_padded(const X* x, int count, Body body) {
    constexpr int STEP = 4 * LANES;
    int i = 0;
    for (; i + STEP <= count; i += STEP) body(i, x + i);
    if (i < count) {
        X padded[STEP] = {};
        std::memcpy(padded, x + i, size_t(std::min(count - i, STEP)) * sizeof(X));  // gcc warns of more, which it never is
        body(i, padded);
    }
}
}  // namespace detail

// Rows of x that lie LDX elements apart and have SCALES scales each, and rows of y that lie LDY apart.
template <class Element, int LDX, int LDY, int SCALES = 1>
class DenseRows {
   public:
    using X = Element;
    static constexpr bool BEST = false;  // whether results are looked at, not written
    DenseRows(const X* x, const float* scale, float* y) : x_(x), scale_(scale), y_(y) {}

    struct Tile {
        const float* x;
        PLANC_INLINE const float* operator()(int m) const { return x + m * LDX; }
    };
    template <int MR>
    PLANC_INLINE Tile tile(int row, int k) const {
        return {x(row) + k};
    }
    PLANC_INLINE const X* x(int row) const { return x_ + int64_t(row) * LDX; }
    PLANC_INLINE float scale(int row, int i = 0) const { return scale_[int64_t(row) * SCALES + i]; }
    PLANC_INLINE float* result(int row) const { return y_ + int64_t(row) * LDY; }

   private:
    const X* const x_;
    const float* const scale_;
    float* const y_;
};

// How rows are kept: as the products of a format take them. PER_FLOAT elements take the place of a float, in SECTIONS;
// DOTS take those of GROUP elements in STEPS, of which step P finds its own for element k in `at`; formats whose lines hold
// more than GROUP go on counting steps, and find bytes IN_TURN where a line holds eight. SUMMED are those that meet bytes
// without a sign: what `put` returns, times the zero of these, is what sums begin with. MOST_K: the k of a panel. TILE_ROWS:
// rows in registers. PANEL_FROM: rows from which on unpacking a panel costs less than doing so for each tile.
struct AsTheyLie {  // f32
    static constexpr bool SUMMED = false;
    static constexpr int MOST_K = 320, TILE_ROWS = 6, PANEL_FROM = 24;
    static constexpr bool DOTS = false;
};

struct AsFloats {  // f8 widened
    static constexpr int PER_FLOAT = 1, SECTIONS = 1, MOST_K = 320, TILE_ROWS = 6, PANEL_FROM = 24;
    static constexpr bool DOTS = false, SUMMED = false;
    template <int APART, bool IN_TURN>
    static PLANC_INLINE void put(const F8* codes, int count, float* y) {
        for_each_vec(count, [&](int i, int n) PLANC_INLINED {
            const Vec wide = n == LANES ? load_as_float(codes + i) : load_as_float(codes + i, n);
            store(y + i, wide * splat(1.0f / Codes<F8>::UNIT));
        });
    }
};

struct AsHalves {  // i8 in pairs of halves: of the codes 4j and 4j + 2, in a section of their own those of the next two
    static constexpr int PER_FLOAT = 4, SECTIONS = 2, GROUP = 4, STEPS = 2, MOST_K = 512, TILE_ROWS = 6, PANEL_FROM = 24;
    static constexpr bool DOTS = true, SUMMED = false;
    template <int APART, bool IN_TURN>
    static PLANC_INLINE void put(const int8_t* codes, int count, float* y) {
        detail::for_each_padded(codes, count, [&](int i, const int8_t* four) PLANC_INLINED {
            const VecI x = detail::maybe_in_turn<IN_TURN>(load_int(four));
            store_int(y + i / PER_FLOAT, even_bytes(x));
            store_int(y + APART + i / PER_FLOAT, odd_bytes(x));
        });
    }
    template <int P, int APART>
    static constexpr int at(int k) {
        return P % STEPS * APART + k / PER_FLOAT + P / STEPS;
    }
    static PLANC_INLINE Vec dot(VecI w, VecI x, Vec sum) { return as_float(dot_halves(w, x, as_int(sum))); }
};

struct AsBytes {  // i8 as it is; the weights have more than they should, which what sums begin with takes off again
    static constexpr int PER_FLOAT = 4, SECTIONS = 1, GROUP = 4, STEPS = 1, MOST_K = 2048, PANEL_FROM = 64;
    static constexpr int TILE_ROWS = BYTE_TILE_ROWS;
    static constexpr bool DOTS = true, SUMMED = true;
    template <int APART, bool IN_TURN>
    static PLANC_INLINE int32_t put(const int8_t* codes, int count, float* y) {
        Vec total = as_float(splat_int(0));
        detail::for_each_padded(codes, count, [&](int i, const int8_t* four) PLANC_INLINED {
            const VecI x = load_int(four);
            store_int(y + i / PER_FLOAT, detail::maybe_in_turn<IN_TURN>(x));
            total = dot_bytes(splat_int(0x01010101), x, total);
        });
        return -sum_of_lanes(as_int(total));
    }
    template <int P, int APART>
    static constexpr int at(int k) {
        return k / PER_FLOAT + P;
    }
    static PLANC_INLINE Vec dot(VecI w, VecI x, Vec sum) { return dot_bytes(w, x, sum); }
};

struct AsBf16 {  // f32 rounded, or f8, in pairs of neighbours
    static constexpr int PER_FLOAT = 2, SECTIONS = 1, GROUP = 2, STEPS = 1, MOST_K = 1536, TILE_ROWS = 6, PANEL_FROM = 7;
    static constexpr bool DOTS = true, SUMMED = false;
    static PLANC_INLINE Vec widen(const float* x) { return load(x); }
    static PLANC_INLINE Vec widen(const F8* codes) { return load_as_float(codes) * splat(1.0f / Codes<F8>::UNIT); }
    template <int APART, bool IN_TURN, class X>
    static PLANC_INLINE void put(const X* x, int count, float* y) {
        detail::for_each_padded(x, count, [&](int i, const X* some) PLANC_INLINED {
            store_int(y + i / PER_FLOAT, bf16_pairs(widen(some), widen(some + LANES)));
            store_int(y + i / PER_FLOAT + LANES, bf16_pairs(widen(some + 2 * LANES), widen(some + 3 * LANES)));
        });
    }
    template <int P, int APART>
    static constexpr int at(int k) {
        return k / PER_FLOAT + P;
    }
    static PLANC_INLINE Vec dot(VecI w, VecI x, Vec sum) { return dot_bf16(w, x, sum); }
};

// f32 in two digits of a byte: x = (one + two / 254) * the row's scale, 15 bits and more of the largest. Whole numbers that
// multiply them are summed exactly, for each SUM_K of k by itself. Of eight k, those at even places come first where a
// format's lines hold eight (GROUP): so its halves of bytes lie.
struct AsDigits {
    static constexpr int PER_FLOAT = 4, GROUP = 4, STEPS = 1, MOST_K = 2048, TILE_ROWS = 4, PANEL_FROM = 64;
    static constexpr bool DOTS = true;
    static constexpr float SECOND = 1.0f / 254.0f;
};

// WIDTH elements a row, kept in a Form for a Format; a panel takes MOST_K of them at most.
template <class Base, int WIDTH, class Form, int MOST_K, class Format>
class KeptRows : public Base {
    // k that are summed on their own: those of a scale, or all.
    static constexpr int SUM_K = Format::SCALE_K ? Format::SCALE_K : WIDTH;
    static constexpr bool IN_TURN = Format::GROUP == 8;
    // Of a row that was prepared whole, or for one panel, whatever its unit.
    template <bool IN_PANELS>
    static constexpr int MOST = IN_PANELS ? detail::panel_k(WIDTH, MOST_K, detail::PANEL_UNIT) : WIDTH;
    template <bool IN_PANELS>
    static constexpr int APART = detail::apart(MOST<IN_PANELS>, Form::PER_FLOAT);
    // What sums begin with lies behind a row's last line, which zeros after a short group may reach into.
    template <bool IN_PANELS>
    static constexpr int SUMS_AT = APART<IN_PANELS> * Form::SECTIONS;
    template <bool IN_PANELS>
    static constexpr int STRIDE = SUMS_AT<IN_PANELS> + (Form::SUMMED ? ((MOST<IN_PANELS> + SUM_K - 1) / SUM_K + LANES - 1) / LANES : 0) * LANES;

   public:
    static constexpr bool SCALED = !std::is_same_v<typename Base::X, float>;
    explicit KeptRows(Base base) : Base(base) {}

    template <bool IN_PANELS>
    void prepare(Range rows, int k, int count) {
        kept_ = detail::thread_floats(size_t(rows.end - rows.begin) * STRIDE<IN_PANELS>);
        first_row_ = rows.begin;
        first_k_ = k;
        for (int row = rows.begin; row < rows.end; ++row) {
            const auto* const x = this->x(row) + k;
            float* const to = kept_ + int64_t(row - rows.begin) * STRIDE<IN_PANELS>;
            if constexpr (Form::SUMMED) {
                for (int g = 0; g < count; g += SUM_K) {
                    const int some = std::min(SUM_K, count - g);
                    const int32_t sum = Format::BYTE_ZERO * Form::template put<APART<IN_PANELS>, IN_TURN>(x + g, some, to + g / Form::PER_FLOAT);
                    std::memcpy(to + SUMS_AT<IN_PANELS> + g / SUM_K, &sum, sizeof sum);
                }
            } else {
                Form::template put<APART<IN_PANELS>, IN_TURN>(x, count, to);
            }
        }
    }

    // Rows from one on, and k from one on.
    template <bool IN_PANELS>
    struct Tile {
        const float* row;
        int from;
        PLANC_INLINE const float* operator()(int m) const { return row + m * STRIDE<IN_PANELS> + from; }
        // What step P of the products takes for k of row m, in every lane.
        template <int P>
        PLANC_INLINE VecI dots(int m, int k) const {
            return as_int(broadcast((*this)(m) + Form::template at<P, APART<IN_PANELS>>(k)));
        }
        // What integer sums of row m begin with: over all k that were prepared, or those of a scale.
        PLANC_INLINE VecI first(int m) const {
            if constexpr (!Form::SUMMED) return splat_int(0);
            const int i = Format::SCALE_K ? from / (SUM_K / Form::PER_FLOAT) : 0;
            return as_int(broadcast(row + m * STRIDE<IN_PANELS> + SUMS_AT<IN_PANELS> + i));
        }
    };
    template <int MR, bool IN_PANELS>
    PLANC_INLINE auto tile(int row, int k) const {
        return Tile<IN_PANELS>{kept_ + int64_t(row - first_row_) * STRIDE<IN_PANELS>, (k - first_k_) / Form::PER_FLOAT};
    }

   private:
    float* kept_ = nullptr;
    int first_row_ = 0, first_k_ = 0;
};

template <class Base, int WIDTH, int MOST_K, class Format>
class KeptRows<Base, WIDTH, AsTheyLie, MOST_K, Format> : public Base {
   public:
    static constexpr bool SCALED = false;
    explicit KeptRows(Base base) : Base(base) {}

    template <bool IN_PANELS>
    PLANC_INLINE void prepare(Range, int, int) {}
    template <int MR, bool IN_PANELS>
    PLANC_INLINE auto tile(int row, int k) const {
        return Base::template tile<MR>(row, k);
    }
};

template <class Base, int WIDTH, class Format, int MOST_K>
class DigitRows : public Base {
    static constexpr int MOST = detail::panel_k(WIDTH, MOST_K, detail::PANEL_UNIT);  // of a panel, whatever its unit

   public:
    // k that are summed on their own: those of a scale, or of a panel.
    static constexpr int SUM_K = Format::SCALE_K ? Format::SCALE_K : detail::panel_k(WIDTH, AsDigits::MOST_K, LANES);
    static constexpr bool SCALED = true;

   private:
    template <bool IN_PANELS>
    static constexpr int APART = detail::apart(IN_PANELS ? MOST : WIDTH, AsDigits::PER_FLOAT);
    // Both digits, then for each SUM_K what the sums of both begin with, then the scale.
    template <bool IN_PANELS>
    static constexpr int SUMS = 2 * (((IN_PANELS ? MOST : WIDTH) + SUM_K - 1) / SUM_K);
    template <bool IN_PANELS>
    static constexpr int STRIDE = 2 * APART<IN_PANELS> + (SUMS<IN_PANELS> + LANES) / LANES * LANES;

   public:
    explicit DigitRows(Base base) : Base(base) {}

    template <bool IN_PANELS>
    void prepare(Range rows, int k, int count) {
        kept_ = detail::thread_floats(size_t(rows.end - rows.begin) * STRIDE<IN_PANELS>);
        scales_ = kept_ + STRIDE<IN_PANELS> - 1;
        stride_ = STRIDE<IN_PANELS>;
        first_row_ = rows.begin;
        first_k_ = k;
        for (int row = rows.begin; row < rows.end; ++row) {
            float* to = kept_ + int64_t(row - rows.begin) * STRIDE<IN_PANELS>;
            const float scale = to[STRIDE<IN_PANELS> - 1] = detail::scale_of<WIDTH>(this->x(row), Codes<int8_t>::LIMIT);
            for (int g = 0; g < count; g += SUM_K) {
                int32_t sums[2];
                put(this->x(row) + k + g, std::min(SUM_K, count - g), scale, to + g / AsDigits::PER_FLOAT, APART<IN_PANELS>, sums);
                std::memcpy(to + 2 * APART<IN_PANELS> + 2 * (g / SUM_K), sums, sizeof sums);
            }
        }
    }
    PLANC_INLINE float scale(int row) const { return scales_[int64_t(row - first_row_) * stride_]; }

    template <bool IN_PANELS>
    struct Tile {
        const float* row;
        int from;
        template <int P, int DIGIT>
        PLANC_INLINE VecI dots(int m, int k) const {
            return as_int(broadcast(row + m * STRIDE<IN_PANELS> + DIGIT * APART<IN_PANELS> + (from + k) / AsDigits::PER_FLOAT + P));
        }
        template <int DIGIT>
        PLANC_INLINE VecI first(int m) const {
            return as_int(broadcast(row + m * STRIDE<IN_PANELS> + 2 * APART<IN_PANELS> + 2 * (from / SUM_K) + DIGIT));
        }
    };
    // k is where sums begin.
    template <int MR, bool IN_PANELS>
    PLANC_INLINE auto tile(int row, int k) const {
        return Tile<IN_PANELS>{kept_ + int64_t(row - first_row_) * STRIDE<IN_PANELS>, k - first_k_};
    }

   private:
    static PLANC_INLINE void put(const float* x, int count, float scale, float* y, int apart, int32_t (&sums)[2]) {
        VecI total[2] = {splat_int(0), splat_int(0)};
        for_each_vec(count, [&](int i, int n) PLANC_INLINED {
            Vec left = detail::ratio_of<int8_t>(load_lanes(x + i, n), scale);
            for (int digit = 0; digit < 2; ++digit) {
                const Vec rounded = detail::round_nearest(left);
                const VecI code = to_int(rounded);
                float* const to = y + digit * apart + i / AsDigits::PER_FLOAT;
                if constexpr (Format::GROUP == 8) {
                    narrow_u8_in_turn(to, code);
                } else {
                    narrow_u8(to, code);
                }
                total[digit] = total[digit] + code;
                left = (left - rounded) * splat(1.0f / AsDigits::SECOND);
            }
        });
        for (int digit = 0; digit < 2; ++digit) sums[digit] = -Format::BYTE_ZERO * sum_of_lanes(total[digit]);
    }

    float *kept_ = nullptr, *scales_ = nullptr;
    int first_row_ = 0, first_k_ = 0;
    int64_t stride_ = 0;
};

}  // namespace planc
