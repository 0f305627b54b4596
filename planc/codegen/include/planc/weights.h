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
// the stored number. `at` is that of one lane, element k of its row. SCALED formats have scales besides: one a column,
// or one for each SCALE_K of its k where that is not 0. Those with ZEROS have as many zero points. X is what they multiply.
// BY_VECTOR: the k of a line share work, and GROUP divides K. Where several k are multiplied at once, dots<P> gives those of
// step P: pairs of bf16, or pairs of halves or bytes without a sign for codes that are multiplied as integers; lines may be
// that as they are (LINES_ARE_DOTS). Codes that multiply codes are INTEGERS, whose rows have a scale for each SCALE_K of
// theirs, too; those that can multiply DIGITS of a number (BYTE_DOTS) are whole numbers. Bytes are BYTE_ZERO more than they
// should be, where ZEROS do not say so, in units of BYTE_UNIT.
struct Plain {
    using X = float;
    static constexpr bool SCALED = false, ZEROS = false, INTEGERS = false, DIGITS = false, BY_VECTOR = false, LINES_ARE_DOTS = false;
    static constexpr int SCALE_K = 0;
    static constexpr float UNIT = 1.0f, BYTE_UNIT = 1.0f;
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
    static constexpr bool LINES_ARE_DOTS = BF16_DOTS;
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

template <int SCALES>
struct GroupedI8 : Plain {  // "n64u4": i8 and 128 [N/64][K/4][64][4], one scale a column or one for each SCALES of its k
    static constexpr int GROUP = 4, SCALE_K = SCALES;
    static constexpr bool SCALED = true;
    // A byte converts from the top of its lane, one instruction less than a sign extension: exact, but 2^24 too large.
    static constexpr float UNIT = 1.0f / 16777216.0f;
    static constexpr bool DIGITS = true, LINES_ARE_DOTS = BYTE_DOTS;
    static constexpr int BYTE_ZERO = 128;
    static PLANC_INLINE VecI codes(const char* line) { return minus_bytes(load_int(line), splat_int(int32_t(0x80808080u))); }
    template <int I>
    static PLANC_INLINE Vec unpack(const char* line) {
        return to_float(byte_at_top<I>(codes(line)));
    }
    template <int P>
    static PLANC_INLINE VecI dots(const char* line) {
        return load_int(line);
    }
    static PLANC_INLINE float at(const char* row, int k) {
        return float(reinterpret_cast<const uint8_t*>(row)[k / GROUP * (BLOCK * GROUP) + k % GROUP]) - float(BYTE_ZERO);
    }
};

using PackedI8 = GroupedI8<0>;

struct DotsI8 : PackedI8 {  // the same bytes, to be multiplied with i8
    using X = int8_t;
    static constexpr bool INTEGERS = true, DIGITS = false;
    static constexpr float UNIT = 1.0f;
    template <int P>
    static PLANC_INLINE VecI dots(const char* line) {
        if constexpr (BYTE_DOTS) return PackedI8::dots<P>(line);
        return P == 0 ? even_bytes(codes(line)) : odd_bytes(codes(line));
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
// a scale [K/SCALES][N].
template <int SCALES>
struct PackedU4 : Plain {
    static constexpr int GROUP = 8, SCALE_K = SCALES;
    static constexpr bool SCALED = true, DIGITS = true, BY_VECTOR = true;
    static_assert(SCALES % GROUP == 0);

    template <int I>
    static PLANC_INLINE VecI codes(const char* line) {
        const VecI lanes = load_int(line);
        return (I % 2 ? shift_right<4>(lanes) : lanes) & splat_int(0x0f0f0f0f);
    }
    template <int P>
    static PLANC_INLINE VecI dots(const char* line) {
        return codes<P>(line);
    }
    static PLANC_INLINE int code(const char* row, int k) {
        const int byte = uint8_t(row[k / GROUP * GROUP_BYTES + k % GROUP / 2]);
        return k % 2 ? byte >> 4 : byte & 15;
    }
};

// The lowest byte of each lane in all of its bytes.
PLANC_INLINE VecI byte_four_times(VecI a) {
    const VecI byte = a & splat_int(0xff), two = byte | shift_left<8>(byte);
    return two | shift_left<16>(two);
}

// Of codes whose zero points `take_zeros` takes, what does not depend on whether those are whole.
template <int SCALES>
struct U4LessZeros : PackedU4<SCALES> {
    static constexpr bool ZEROS = true;
    static constexpr int BYTE_ZERO = -1;  // the sums of digits themselves
    static constexpr float UNIT = PackedI8::UNIT;
    static PLANC_INLINE float at(const char* row, int k) { return float(PackedU4<SCALES>::code(row, k)); }
};
}  // namespace detail

// Codes less OFFSET.
template <int SCALES, int OFFSET>
struct OffsetU4 : detail::PackedU4<SCALES> {
    using Base = detail::PackedU4<SCALES>;
    static constexpr float UNIT = PackedI8::UNIT;
    static constexpr int BYTE_ZERO = OFFSET;
    template <int I>
    static PLANC_INLINE Vec unpack(const char* line) {
        return to_float(byte_at_top<I / 2>(minus_bytes(Base::template codes<I>(line), splat_int(0x01010101 * OFFSET))));
    }
    static PLANC_INLINE float at(const char* row, int k) { return float(Base::code(row, k) - OFFSET); }

};

// Codes less a whole number for each column and SCALES of k, [K/SCALES][N].
template <int SCALES>
struct ZerosU4 : detail::U4LessZeros<SCALES> {
    using Base = detail::U4LessZeros<SCALES>;

    // The zero points of sixteen columns, which unpack takes off. They fit in a byte.
    PLANC_INLINE void take_zeros(Vec z) { zeros_ = detail::byte_four_times(to_int(z)); }
    template <int I>
    PLANC_INLINE Vec unpack(const char* line) const {
        return to_float(byte_at_top<I / 2>(minus_bytes(Base::template codes<I>(line), zeros_)));
    }

   private:
    VecI zeros_;
};

// The same, to be multiplied with i8.
template <int SCALES>
struct DotsU4 : detail::PackedU4<SCALES> {
    using Base = detail::PackedU4<SCALES>;
    using X = int8_t;
    static constexpr bool ZEROS = true, INTEGERS = true, DIGITS = false;
    static constexpr int BYTE_ZERO = 15;  // zero points are 0..15: what a code less one may lack to be none below 0

    PLANC_INLINE void take_zeros(Vec z) { zeros_ = detail::byte_four_times(to_int(z) - splat_int(BYTE_DOTS ? BYTE_ZERO : 0)); }
    template <int P>
    PLANC_INLINE VecI dots(const char* line) const {
        if constexpr (BYTE_DOTS) return minus_bytes(Base::template codes<P>(line), zeros_);
        const VecI bytes = minus_bytes(Base::template codes<P / 2>(line), zeros_);
        return P % 2 ? odd_bytes(bytes) : even_bytes(bytes);
    }
    static PLANC_INLINE float at(const char* row, int k) { return float(Base::code(row, k)); }

   private:
    VecI zeros_;
};

// Codes less a number for each column and SCALES of k, f32 [K/SCALES][N].
template <int SCALES>
struct FractionsU4 : detail::U4LessZeros<SCALES> {
    using Base = detail::U4LessZeros<SCALES>;

    PLANC_INLINE void take_zeros(Vec z) { zeros_ = z * splat(1.0f / Base::UNIT); }
    template <int I>
    PLANC_INLINE Vec unpack(const char* line) const {
        return to_float(byte_at_top<I / 2>(Base::template codes<I>(line))) - zeros_;
    }

   private:
    Vec zeros_;
};

// Codes in e2m1: sign, two bits of exponent, one of mantissa.
template <int SCALES>
struct E2m1 : detail::PackedU4<SCALES> {
    using Base = detail::PackedU4<SCALES>;
    static constexpr int8_t TWICE[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    static constexpr int8_t TWICE_AND_12[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    static constexpr float UNIT = PackedI8::UNIT / 2, BYTE_UNIT = 0.5f;
    static constexpr int BYTE_ZERO = 12;
    template <int I>
    static PLANC_INLINE Vec unpack(const char* line) {
        return to_float(byte_at_top<I / 2>(look_up_bytes(TWICE, Base::template codes<I>(line))));
    }
    template <int P>
    static PLANC_INLINE VecI dots(const char* line) {
        return look_up_bytes(TWICE_AND_12, Base::template codes<P>(line));
    }
    static PLANC_INLINE float at(const char* row, int k) { return 0.5f * float(TWICE[Base::code(row, k)]); }

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
