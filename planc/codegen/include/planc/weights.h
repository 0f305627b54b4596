// Element types and layouts of weights, and how a packed 64-byte line (16 columns) or a row-major row widens to f32.
#pragma once
#include "planc/dots.h"
#include "planc/narrow.h"

namespace planc {

constexpr int BLOCK = 64;        // output columns of a packed block
constexpr int LINE_BYTES = 64;   // 16 columns x one group of k
constexpr int GROUP_BYTES = 256;  // 64 columns x one group of k

PLANC_INLINE float f8_to_float(F8 code) {
    const uint32_t bits = uint32_t(code.bits & 0x80) << 24 | uint32_t(code.bits & 0x7f) << 20;
    float value;
    std::memcpy(&value, &bits, 4);
    return value * 0x1p120f;
}

// A packed format holds GROUP consecutive k of 16 columns in each line. unpack<I> gives the group's k = I; times UNIT it is
// the stored number. `at` is that of one lane, element k of its row. SCALED formats have f32 scales besides: one a column,
// or one for each SCALE_K of its k where that is not 0. Those with ZEROS have as many zero points. X is what they multiply.
// BY_VECTOR: the k of a line share work, and GROUP divides K. Where several k are multiplied at once, dots<P> gives those of
// step P: pairs of bf16 in units of UNIT, or for codes that multiply codes as integers (INTEGERS) pairs of halves or bytes.
struct Plain {
    using X = float;
    static constexpr bool SCALED = false, ZEROS = false, INTEGERS = false, BY_VECTOR = false;
    static constexpr int SCALE_K = 0;
    static constexpr float UNIT = 1.0f;
};
struct PackedF32 : Plain {  // "n64": f32 [N/64][K][64]
    static constexpr int GROUP = 1;
    template <int I>
    static PLANC_INLINE Vec unpack(const char* line) {
        return load(reinterpret_cast<const float*>(line));
    }
    static PLANC_INLINE float at(const char* row, int k) { return reinterpret_cast<const float*>(row)[k * BLOCK]; }
};

struct PackedBf16 : Plain {  // "n64k2": bf16 [N/64][K/2][64][2]
    static constexpr int GROUP = 2;
    template <int I>
    static PLANC_INLINE Vec unpack(const char* line) {
        return I == 0 ? bf16_low(load_int(line)) : bf16_high(load_int(line));
    }
    template <int P>
    static PLANC_INLINE VecI dots(const char* line) {
        return load_int(line);
    }
    static PLANC_INLINE float at(const char* row, int k) {
        return bf16_to_float(reinterpret_cast<const uint16_t*>(row)[k / GROUP * (BLOCK * GROUP) + k % GROUP]);
    }
};

namespace detail {
// The upper halves of two vectors of f32 side by side: bf16, for numbers that it holds exactly.
PLANC_INLINE VecI upper_halves(Vec low, Vec high) { return shift_right<16>(as_int(low)) | (as_int(high) & splat_int(int32_t(0xffff0000u))); }
}  // namespace detail

struct PackedI8 : Plain {  // "n64k4": i8 [N/64][K/4][64][4], f32 scale [N]
    static constexpr int GROUP = 4;
    static constexpr bool SCALED = true;
    // A byte converts from the top of its lane, one instruction less than a sign extension: exact, but 2^24 too large.
    static constexpr float UNIT = 1.0f / 16777216.0f;
    template <int I>
    static PLANC_INLINE Vec unpack(const char* line) {
        return to_float(byte_at_top<I>(load_int(line)));
    }
    template <int P>
    static PLANC_INLINE VecI dots(const char* line) {
        return detail::upper_halves(unpack<2 * P>(line), unpack<2 * P + 1>(line));
    }
    static PLANC_INLINE float at(const char* row, int k) {
        return float(reinterpret_cast<const int8_t*>(row)[k / GROUP * (BLOCK * GROUP) + k % GROUP]);
    }
};

struct DotsI8 : PackedI8 {  // the same bytes, to be multiplied with i8
    using X = int8_t;
    static constexpr bool INTEGERS = true;
    static constexpr float UNIT = 1.0f;
    template <int P>
    static PLANC_INLINE VecI dots(const char* line) {
        if constexpr (BYTE_DOTS) return minus_bytes(load_int(line), splat_int(int32_t(0x80808080u)));  // 128 more, without a sign
        return P == 0 ? even_bytes(load_int(line)) : odd_bytes(load_int(line));
    }
};

// "n64k4": f8e4m3, one f32 scale a column or one for each SCALES of its k. No code may be a NaN.
template <int SCALES>
struct PackedF8 : Plain {
    using X = F8;
    static constexpr int GROUP = 4, SCALE_K = SCALES;
    static constexpr bool SCALED = true;
    // A code's exponent and mantissa at their place in an f32 mean 2^-120 of the number, below the normal ones too: in bf16,
    // whose products take those for zero, it has to be the number.
    static constexpr float PLACED = 0x1p120f, UNIT = BF16_DOTS ? 1.0f : PLACED;
    template <int I>
    static PLANC_INLINE Vec unpack(const char* line) {
        return as_float(shift_right_signed<4>(byte_at_top<I>(load_int(line))) & splat_int(int32_t(0x87f00000u)));
    }
    template <int P>
    static PLANC_INLINE VecI dots(const char* line) {
        return detail::upper_halves(unpack<2 * P>(line) * splat(PLACED), unpack<2 * P + 1>(line) * splat(PLACED));
    }
    static PLANC_INLINE float at(const char* row, int k) {
        return f8_to_float(reinterpret_cast<const F8*>(row)[k / GROUP * (BLOCK * GROUP) + k % GROUP]);
    }
};

namespace detail {
// "n64k8": codes of 4 bits [N/64][K/8][64][4], that of an even k in the low half of a byte. Each SCALES of a column's k have
// a f32 scale [K/SCALES][N].
template <int SCALES>
struct PackedU4 : Plain {
    static constexpr int GROUP = 8, SCALE_K = SCALES;
    static constexpr bool SCALED = true, BY_VECTOR = true;
    static_assert(SCALES % GROUP == 0);

    template <int I>
    static PLANC_INLINE VecI codes(const char* line) {
        const VecI lanes = load_int(line);
        return (I % 2 ? shift_right<4>(lanes) : lanes) & splat_int(0x0f0f0f0f);
    }
    static PLANC_INLINE int code(const char* row, int k) {
        const int byte = uint8_t(row[k / GROUP * GROUP_BYTES + k % GROUP / 2]);
        return k % 2 ? byte >> 4 : byte & 15;
    }
    // The codes of k = 2P and 2P + 1 in the lowest bits of a lane's halves; above them lies anything.
    template <int P>
    static PLANC_INLINE VecI pairs(const char* line) {
        constexpr int LOW = 8 * P, HIGH = LOW + 4;
        const VecI lanes = load_int(line), low = P == 0 ? lanes : shift_right<LOW>(lanes);
        if constexpr (HIGH < 16) return pick_bits(splat_int(0xffff), low, shift_left<16 - HIGH>(lanes));
        return pick_bits(splat_int(0xffff), low, shift_right<HIGH < 16 ? 0 : HIGH - 16>(lanes));
    }
};

// The bf16 bits of a whole number below 256.
constexpr uint16_t bf16_of(int number) {
    const int size = number < 0 ? -number : number;
    int exponent = 0;
    while (size >> (exponent + 1)) ++exponent;
    return size ? uint16_t((number < 0) << 15 | (127 + exponent) << 7 | (size << (7 - exponent) & 0x7f)) : uint16_t(0);
}
struct HalfTable {
    uint16_t at[2 * LANES];
};
template <class Number>
constexpr HalfTable bf16_table(Number number) {
    HalfTable made = {};
    for (int i = 0; i < 2 * LANES; ++i) made.at[i] = bf16_of(number(i));
    return made;
}
}  // namespace detail

// Codes less OFFSET.
template <int SCALES, int OFFSET>
struct OffsetU4 : detail::PackedU4<SCALES> {
    using Base = detail::PackedU4<SCALES>;
    static constexpr float UNIT = BF16_DOTS ? 1.0f : PackedI8::UNIT;
    template <int I>
    static PLANC_INLINE Vec unpack(const char* line) {
        return to_float(byte_at_top<I / 2>(minus_bytes(Base::template codes<I>(line), splat_int(0x01010101 * OFFSET))));
    }
    template <int P>
    static PLANC_INLINE VecI dots(const char* line) {
        return look_up_halves(NUMBERS.at, Base::template pairs<P>(line));
    }
    static PLANC_INLINE float at(const char* row, int k) { return float(Base::code(row, k) - OFFSET); }

   private:
    static constexpr detail::HalfTable NUMBERS = detail::bf16_table([](int i) { return i % 16 - OFFSET; });
};

// Codes less a whole number for each column and SCALES of k, f32 [K/SCALES][N].
template <int SCALES>
struct ZerosU4 : detail::PackedU4<SCALES> {
    using Base = detail::PackedU4<SCALES>;
    static constexpr bool ZEROS = true;
    static constexpr float UNIT = BF16_DOTS ? 1.0f : PackedI8::UNIT;

    // The zero points of sixteen columns, which unpack and dots take off. They fit in a byte.
    PLANC_INLINE void take_zeros(Vec z) {
        const VecI byte = to_int(z) & splat_int(0xff), two = BF16_DOTS ? byte : byte | shift_left<8>(byte);
        zeros_ = two | shift_left<16>(two);
    }
    template <int I>
    PLANC_INLINE Vec unpack(const char* line) const {
        return to_float(byte_at_top<I / 2>(minus_bytes(Base::template codes<I>(line), zeros_)));
    }
    template <int P>
    PLANC_INLINE VecI dots(const char* line) const {
        return look_up_halves(NUMBERS.at, minus_halves(Base::template pairs<P>(line) & splat_int(0x000f000f), zeros_));
    }
    static PLANC_INLINE float at(const char* row, int k) { return float(Base::code(row, k)); }

   private:
    static constexpr detail::HalfTable NUMBERS = detail::bf16_table([](int i) { return i < 16 ? i : i - 32; });
    VecI zeros_;
};

// Codes in e2m1: sign, two bits of exponent, one of mantissa.
template <int SCALES>
struct E2m1 : detail::PackedU4<SCALES> {
    using Base = detail::PackedU4<SCALES>;
    static constexpr int8_t TWICE[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    static constexpr float UNIT = BF16_DOTS ? 0.5f : PackedI8::UNIT / 2;
    template <int I>
    static PLANC_INLINE Vec unpack(const char* line) {
        return to_float(byte_at_top<I / 2>(look_up_bytes(TWICE, Base::template codes<I>(line))));
    }
    template <int P>
    static PLANC_INLINE VecI dots(const char* line) {
        return look_up_halves(NUMBERS.at, Base::template pairs<P>(line));
    }
    static PLANC_INLINE float at(const char* row, int k) { return 0.5f * float(TWICE[Base::code(row, k)]); }

   private:
    static constexpr detail::HalfTable NUMBERS = detail::bf16_table([](int i) { return int(TWICE[i % 16]); });
};

// Bytes of the packed matrix before block b of K columns.
template <class Format>
PLANC_INLINE int64_t block_offset(int64_t block, int k) {
    return block * ((k + Format::GROUP - 1) / Format::GROUP) * GROUP_BYTES;
}

// Where row `row` of a packed matrix of K columns begins: its lane in its block.
template <class Format>
PLANC_INLINE const char* lane_of(const void* weight, int row, int k) {
    constexpr int LANE_BYTES = GROUP_BYTES / BLOCK;
    return static_cast<const char*>(weight) + block_offset<Format>(row / BLOCK, k) + row % BLOCK * LANE_BYTES;
}

}  // namespace planc
