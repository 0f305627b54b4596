// Element types and layouts of weights, and how a packed 64-byte line (16 columns) or a row-major row widens to f32.
#pragma once
#include "planc/simd.h"

namespace planc {

constexpr int BLOCK = 64;        // output columns of a packed block
constexpr int LINE_BYTES = 64;   // 16 columns x one group of k
constexpr int GROUP_BYTES = 256;  // 64 columns x one group of k

// A packed format holds GROUP consecutive k of 16 columns in each line. unpack<I> gives the group's k = I; times UNIT it is
// the stored number. SCALED formats have one f32 factor a column besides.
struct PackedF32 {  // "n64": f32 [N/64][K][64]
    using Element = float;
    static constexpr int GROUP = 1;
    static constexpr bool SCALED = false;
    static constexpr float UNIT = 1.0f;
    template <int I>
    static PLANC_INLINE Vec unpack(const char* line) {
        return load(reinterpret_cast<const float*>(line));
    }
};

struct PackedBf16 {  // "n64k2": bf16 [N/64][K/2][64][2]
    using Element = uint16_t;
    static constexpr int GROUP = 2;
    static constexpr bool SCALED = false;
    static constexpr float UNIT = 1.0f;
    template <int I>
    static PLANC_INLINE Vec unpack(const char* line) {
        return I == 0 ? bf16_low(load_int(line)) : bf16_high(load_int(line));
    }
};

struct PackedI8 {  // "n64k4": i8 [N/64][K/4][64][4], f32 scale [N]
    using Element = int8_t;
    static constexpr int GROUP = 4;
    static constexpr bool SCALED = true;
    // A byte converts from the top of its lane, one instruction less than a sign extension: exact, but 2^24 too large.
    static constexpr float UNIT = 1.0f / 16777216.0f;
    template <int I>
    static PLANC_INLINE Vec unpack(const char* line) {
        return to_float(byte_at_top<I>(load_int(line)));
    }
};

// Bytes of the packed matrix before block b of K columns.
template <class Format>
PLANC_INLINE int64_t block_offset(int64_t block, int k) {
    return block * ((k + Format::GROUP - 1) / Format::GROUP) * GROUP_BYTES;
}

}  // namespace planc
