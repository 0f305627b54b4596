// Rows that a linear layer multiplies: f32 where it lies, or codes with a scale a row, widened into the thread's own memory.
//
// A base says where row r of x begins (`x`), its scale (`scale`) and where its result goes (`result`). WideRows gives a tile
// of rows as the kernels read them, from element k on; `prepare` comes first, for the rows and k that the tiles will cover.
#pragma once
#include <type_traits>
#include <vector>

#include "planc/bytes.h"
#include "planc/narrow.h"
#include "planc/share.h"

namespace planc {

namespace detail {
// k of an unpacked panel of 16 columns, a multiple of `unit`: in equal parts, of which one takes no more than 20 KB as f32
// and 16 KB as pairs, so that it stays in the L1 cache beside a tile of rows.
constexpr int PANEL_UNIT = 128;  // the largest
template <class X>
constexpr int panel_k(int k, int unit) {
    constexpr int MOST = std::is_same_v<X, int8_t> ? 512 : 320;
    const int parts = (k + MOST - 1) / MOST, each = (k + parts - 1) / parts;
    return (each + unit - 1) / unit * unit;
}
// Floats from one row of `k` widened elements to the next, or from its even pairs to its odd ones: whole vectors, and a line
// more, as a power of two would put all rows into one set of the cache.
constexpr int apart(int k, int per_float) { return (k + 63) / 64 * 64 / per_float + LANES; }

// Floats of this thread's own, for the rows of one kernel at a time.
inline float* thread_floats(size_t count) {
    static thread_local std::vector<float> memory;
    if (memory.size() < count) memory.resize(count);
    return memory.data();
}

// y[0..count) = the numbers of codes.
template <int ODD>
PLANC_INLINE void widen_row(const F8* codes, int count, float* y) {
    for_each_vec(count, [&](int i, int n) PLANC_INLINED {
        const Vec wide = n == LANES ? load_as_float(codes + i) : load_as_float(codes + i, n);
        store(y + i, wide * splat(1.0f / Codes<F8>::UNIT));
    });
}

// Pairs of signed halves, a pair in the place of a float: of the codes 4j and 4j + 2 at j, of the next two ODD later.
template <int ODD>
PLANC_INLINE void widen_row(const int8_t* codes, int count, float* y) {
    constexpr int STEP = 4 * LANES;
    for (int i = 0; i < count; i += STEP, codes += STEP, y += LANES) {
        int8_t padded[STEP] = {};
        if (count - i < STEP) std::memcpy(padded, codes, size_t(count - i));
        const VecI four = load_int(count - i < STEP ? padded : codes);
        store_int(y, even_bytes(four));
        store_int(y + ODD, odd_bytes(four));
    }
}
}  // namespace detail

// Rows of x that lie LDX elements apart, and rows of y that lie LDY apart.
template <class Element, int LDX, int LDY>
class DenseRows {
   public:
    using X = Element;
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
    PLANC_INLINE float scale(int row) const { return scale_[row]; }
    PLANC_INLINE float* result(int row) const { return y_ + int64_t(row) * LDY; }

   private:
    const X* const x_;
    const float* const scale_;
    float* const y_;
};

// Codes: WIDTH of them a row.
template <class Base, int WIDTH, class Element = typename Base::X>
class WideRows : public Base {
    static constexpr bool PAIRS = std::is_same_v<Element, int8_t>;
    // Of a row that was prepared whole, or for one panel, whatever its unit.
    template <bool IN_PANELS>
    static constexpr int ODD = detail::apart(IN_PANELS ? detail::panel_k<Element>(WIDTH, detail::PANEL_UNIT) : WIDTH, PAIRS ? 4 : 1);
    template <bool IN_PANELS>
    static constexpr int STRIDE = ODD<IN_PANELS> * (PAIRS ? 2 : 1);

   public:
    static constexpr bool SCALED = true;
    explicit WideRows(Base base) : Base(base) {}

    template <bool IN_PANELS>
    void prepare(Range rows, int k, int count) {
        wide_ = detail::thread_floats(size_t(rows.end - rows.begin) * STRIDE<IN_PANELS>);
        first_row_ = rows.begin;
        first_k_ = k;
        for (int row = rows.begin; row < rows.end; ++row) {
            float* to = wide_ + int64_t(row - rows.begin) * STRIDE<IN_PANELS>;
            detail::widen_row<ODD<IN_PANELS>>(this->x(row) + k, count, to);
        }
    }

    template <bool IN_PANELS>
    struct Tile {
        static constexpr int ODD = WideRows::ODD<IN_PANELS>;
        const float* x;
        PLANC_INLINE const float* operator()(int m) const { return x + m * STRIDE<IN_PANELS>; }
    };
    template <int MR, bool IN_PANELS>
    PLANC_INLINE auto tile(int row, int k) const {
        const int from = PAIRS ? (k - first_k_) / 4 : k - first_k_;
        return Tile<IN_PANELS>{wide_ + int64_t(row - first_row_) * STRIDE<IN_PANELS> + from};
    }

   private:
    float* wide_ = nullptr;
    int first_row_ = 0, first_k_ = 0;
};

template <class Base, int WIDTH>
class WideRows<Base, WIDTH, float> : public Base {
   public:
    static constexpr bool SCALED = false;
    explicit WideRows(Base base) : Base(base) {}

    template <bool IN_PANELS>
    PLANC_INLINE void prepare(Range, int, int) {}
    template <int MR, bool IN_PANELS>
    PLANC_INLINE auto tile(int row, int k) const {
        return Base::template tile<MR>(row, k);
    }
};

}  // namespace planc
