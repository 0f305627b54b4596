// Rows of an embedding table as f32: y[t] = table[ids[t]], from a row-major table or from the head's packed weight.
#pragma once
#include "planc/share.h"
#include "planc/weights.h"

namespace planc {

// Config: WIDTH (elements of a row), COUNT (rows of the table). K_A_SCALE: how many elements share a scale, 0 for all.
template <class Config, class Element, int K_A_SCALE>
struct RowMajorTable {
    static constexpr int D = Config::WIDTH, SCALE_K = K_A_SCALE;
    static PLANC_INLINE void read(const void* table, int row, float* y) {
        const Element* p = static_cast<const Element*>(table) + int64_t(row) * D;
        for_each_vec(D, [&](int i, int n) PLANC_INLINED {
            if (n == LANES) {
                store(y + i, number(load_as_float(p + i)));
            } else {
                store(y + i, number(load_as_float(p + i, n)), n);
            }
        });
    }

   private:
    static PLANC_INLINE Vec number(Vec x) {
        if constexpr (std::is_same_v<Element, F8>) return x * splat(1.0f / Codes<F8>::UNIT);
        return x;
    }
};

// Row v of a packed W[COUNT, WIDTH] is lane v % 64 of block v / 64.
template <class Config, class Format>
struct PackedTable {
    static constexpr int D = Config::WIDTH, SCALE_K = Format::SCALE_K;
    static PLANC_INLINE void read(const void* table, int row, float* y) {
        const char* lane = lane_of<Format>(table, row, D);
        for (int k = 0; k < D; ++k) y[k] = Format::at(lane, k);
    }
};

// y f32 [rows, WIDTH]; scale and zeros [COUNT] or [WIDTH/SCALE_K, COUNT], or null. An id outside the table gives zeros:
// the caller checks ids.
template <class Config, class Table, class Scale>
void embed(int rows, int thread, int threads, const void* table, const Scale* scale, const Scale* zeros, const int32_t* ids, float* y) {
    const Range mine = share(rows, thread, threads);
    for (int r = mine.begin; r < mine.end; ++r) {
        float* out = y + int64_t(r) * Config::WIDTH;
        const int id = ids[r];
        if (id < 0 || id >= Config::COUNT) {
            std::memset(out, 0, sizeof(float) * Config::WIDTH);
            continue;
        }
        Table::read(table, id, out);
        if (!scale) continue;
        for (int k = 0; k < Config::WIDTH; ++k) {
            const int64_t at = int64_t(Table::SCALE_K ? k / (Table::SCALE_K + !Table::SCALE_K) : 0) * Config::COUNT + id;
            out[k] = (zeros ? out[k] - element_to_float(zeros[at]) : out[k]) * element_to_float(scale[at]);
        }
    }
}

}  // namespace planc
