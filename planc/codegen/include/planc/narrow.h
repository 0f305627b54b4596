// Vectors in 8 bits: in go floats, out come codes and the one scale that they share, and back.
//
//     code = round(x / scale), scale = amax(|x|) / LIMIT
//
// A vector of zeros has scale 0. One that holds a NaN or an infinity has scale NaN, which says so to whoever reads it.
#pragma once
#include <type_traits>

#include "planc/bytes.h"
#include "planc/vecmath.h"

namespace planc {

// An element in f8e4m3: sign, four bits of exponent (bias 7), three of mantissa.
struct F8 {
    uint8_t bits;
};
// An element in f8e3m4: a bit of exponent less (bias 3), one of mantissa more.
struct F8E3M4 {
    uint8_t bits;
};

// LIMIT: the largest magnitude of a code. `widen` gives codes times UNIT, a power of two.
template <class Element>
struct Codes {
    static constexpr bool SCALED = false;
};

template <>
struct Codes<int8_t> {
    static constexpr bool SCALED = true;
    static constexpr float LIMIT = 127.0f, UNIT = 1.0f;
    static PLANC_INLINE VecI of(Vec x) { return to_int(detail::round_nearest(x)); }
};

template <int MANTISSA, int BIAS>
struct FloatCodes {
    static constexpr bool SCALED = true;
    static constexpr float UNIT = 1.0f / float(1 << (15 - BIAS)), LEAST = 2.0f / float(1 << BIAS);
    static PLANC_INLINE Vec widen(const uint8_t* p) { return widen_f8<MANTISSA>(p); }
    // Ties to even. Below LEAST, the smallest with a hidden bit, codes are equally far apart.
    static PLANC_INLINE VecI of(Vec x) {
        constexpr int DROPPED = 23 - MANTISSA;
        const VecI bits = as_int(x), magnitude = bits & splat_int(0x7fffffff);
        const VecI odd = shift_right<DROPPED>(magnitude) & splat_int(1);
        const VecI rounded = magnitude + splat_int((1 << (DROPPED - 1)) - 1) + odd;
        const VecI normal = shift_right<DROPPED>(rounded) - splat_int((127 - BIAS) << MANTISSA);
        const VecI tiny = to_int(detail::round_nearest(as_float(magnitude) * splat(float(1 << MANTISSA) / LEAST)));
        const VecI code = select(less(as_float(magnitude), splat(LEAST)), tiny, normal);
        return code | (shift_right<24>(bits) & splat_int(0x80));
    }
};
template <>
struct Codes<F8> : FloatCodes<3, 7> {
    static constexpr float LIMIT = 448.0f;
};
template <>
struct Codes<F8E3M4> : FloatCodes<4, 3> {
    static constexpr float LIMIT = 15.5f;
};

template <class Float8, class = decltype(&Codes<Float8>::widen)>
PLANC_INLINE Vec load_as_float(const Float8* p) {
    return Codes<Float8>::widen(&p->bits);
}
template <class Float8, class = decltype(&Codes<Float8>::widen)>
PLANC_INLINE Vec load_as_float(const Float8* p, int n) {
    uint8_t padded[LANES] = {};
    std::memcpy(padded, p, size_t(n < LANES ? n : LANES));  // gcc warns of more, which n never is
    return Codes<Float8>::widen(padded);
}

namespace detail {
template <int WIDTH>
PLANC_INLINE float scale_of(const float* x, float limit) {
    Vec top = zero(), poison = zero();
    for_each_vec(WIDTH, [&](int i, int n) PLANC_INLINED {
        const Vec v = load_lanes(x + i, n);
        top = max(abs(v), top);
        poison = poison + (v - v);  // 0, or a NaN when v is no number
    });
    return max(top) / limit + sum(poison);
}

// Codes of ratios that the scale has divided already: `n` of them, `stride` elements apart.
template <class Element>
PLANC_INLINE void put_codes(Vec ratio, Element* to, int64_t stride, int n) {
    const VecI codes = Codes<Element>::of(ratio);
    if (stride == 1 && n == LANES) return narrow_u8(to, codes);
    uint8_t bytes[LANES];
    narrow_u8(bytes, codes);
    for (int lane = 0; lane < n; ++lane) std::memcpy(to + lane * stride, bytes + lane, 1);
}

// What a code stands for in units of the scale; 0 for a scale that is none.
template <class Element>
PLANC_INLINE Vec ratio_of(Vec x, float scale) {
    using C = Codes<Element>;
    return scale > 0.0f ? min(splat(C::LIMIT), max(splat(-C::LIMIT), x / splat(scale))) : zero();
}
}  // namespace detail

// Writes the codes of x[WIDTH], `stride` elements apart, and returns their scale.
template <int WIDTH, class Element>
PLANC_INLINE float narrow(const float* x, Element* to, int64_t stride) {
    using C = Codes<Element>;
    const float scale = detail::scale_of<WIDTH>(x, C::LIMIT);
    for_each_vec(WIDTH, [&](int i, int n) PLANC_INLINED {
        detail::put_codes(detail::ratio_of<Element>(load_lanes(x + i, n), scale), to + i * stride, stride, n);
    });
    return scale;
}

// Of x[WIDTH], whose codes[WIDTH] and scale are known, writes behind the codes: those of what rounding took from the
// OUTLIERS among the features, and these features' codes again.
template <int WIDTH, int OUTLIERS, class Float8>
PLANC_INLINE void second_digits(const float* x, float scale, const int32_t* outliers, Float8* codes) {
    Float8 *left = codes + WIDTH, *again = left + OUTLIERS;
    alignas(64) float picked[OUTLIERS + LANES];
    for (int i = 0; i < OUTLIERS; ++i) {
        picked[i] = x[outliers[i]];
        again[i] = codes[outliers[i]];
    }
    for_each_vec(OUTLIERS, [&](int i, int n) PLANC_INLINED {
        const Vec first = load_as_float(again + i, n) * splat(1.0f / Codes<Float8>::UNIT);
        detail::put_codes(detail::ratio_of<Float8>(load_lanes(picked + i, n), scale) - first, left + i, 1, n);
    });
}

}  // namespace planc
