// Rows of an embedding table as f32: y[t] = table[ids[t]], from a row-major table or from the head's packed weight.
#pragma once
#include "planc/share.h"
#include "planc/weights.h"

namespace planc {

// Config: WIDTH (elements of a row), COUNT (rows of the table).
template <class Config, class Element>
struct RowMajorTable {
    static constexpr int D = Config::WIDTH;
    static PLANC_INLINE void read(const void* table, int row, float* y) {
        const Element* p = static_cast<const Element*>(table) + int64_t(row) * D;
        for_each_vec(D, [&](int i, int n) PLANC_INLINED {
            if (n == LANES) {
                store(y + i, load_as_float(p + i));
            } else {
                store(y + i, load_as_float(p + i, n), n);
            }
        });
    }
};

// Row v of a packed W[COUNT, WIDTH] is lane v % 64 of block v / 64.
template <class Config, class Format>
struct PackedTable {
    static constexpr int D = Config::WIDTH, GROUP = Format::GROUP;
    static PLANC_INLINE void read(const void* table, int row, float* y) {
        using Element = typename Format::Element;
        const char* block = static_cast<const char*>(table) + block_offset<Format>(row / BLOCK, D);
        const Element* p = reinterpret_cast<const Element*>(block) + row % BLOCK * GROUP;
        for (int k = 0; k < D; ++k) y[k] = element_to_float(p[k / GROUP * (BLOCK * GROUP) + k % GROUP]);
    }
};

// y f32 [rows, WIDTH]; scale f32 [COUNT] or null. An id outside the table gives zeros: the caller checks ids.
template <class Config, class Table>
void embed(int rows, int thread, int threads, const void* table, const float* scale, const int32_t* ids, float* y) {
    const Range mine = share(rows, thread, threads);
    for (int r = mine.begin; r < mine.end; ++r) {
        float* out = y + int64_t(r) * Config::WIDTH;
        const int id = ids[r];
        if (id < 0 || id >= Config::COUNT) {
            std::memset(out, 0, sizeof(float) * Config::WIDTH);
            continue;
        }
        Table::read(table, id, out);
        if (scale) {
            for (int k = 0; k < Config::WIDTH; ++k) out[k] = out[k] * scale[id];
        }
    }
}

}  // namespace planc
